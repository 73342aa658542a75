"""Takes away each join, wait, mark and event of the source in turn: the checker must notice.

    python -m tests.lanes.mutations                 # every one; minutes
    python -m tests.lanes.mutations engine/unshard  # those of files whose path has this in it
    python -m tests.lanes.mutations --markdown      # as a table

A line that nobody misses is a line too much, or a program that is missing in ``programs.py``.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fullshard"
FOLDERS = ("device", "comm", "engine", "optim", "frontend")
NAMES = frozenset("join wait wait_event wait_stream mark record synchronize".split())
ELSEWHERE = {
    "comm/c10d.py": "transports are not looked into",
    "comm/means.py": "transports are not looked into",
    "comm/native.py": "transports are not looked into",
    "comm/pairs.py": "transports are not looked into",
    "comm/public.py": "transports are not looked into",
    "comm/shared.py": "transports are not looked into",
    "comm/meeting.py": "meets on the host",
    "comm/labels.py": "compares on the host",
}
EXEMPT = {
    ("CpuLanes.wait", "pending.wait()"): "on a CPU",
    ("StreamLanes.join", "before.record(stream)"): "takes the time",
    ("StreamLanes.join", "after.record(stream)"): "takes the time",
    ("StreamLanes.waited_s", "after.synchronize()"): "takes the time",
    ("Together.wait", "part.wait()"): "",
}


class Mutation(NamedTuple):
    """A statement, and what is put in its place."""

    path: str  # relative to the package
    line: int
    where: str  # class and function
    text: str
    source: str  # of the whole file, mutated


def mutations() -> Iterator[Mutation]:
    """All there are, file by file."""
    for folder in FOLDERS:
        for file in sorted((SOURCE / folder).rglob("*.py")):
            path = file.relative_to(SOURCE).as_posix()
            if path not in ELSEWHERE:
                yield from _of_file(path, file.read_text("utf-8"))


def _of_file(path: str, source: str) -> Iterator[Mutation]:
    for where, statement in _statements(ast.parse(source), ()):
        left = _without(statement)
        if left is None:
            continue
        text = ast.unparse(statement)
        if (where, text) in EXEMPT:
            continue
        lines = source.splitlines(keepends=True)
        first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
        indent = " " * statement.col_offset
        lines[first:last] = [indent + left + "\n"]
        yield Mutation(path, statement.lineno, where, text, "".join(lines))


def _statements(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, ast.stmt]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield from _statements(child, (*names, child.name))
            continue
        if isinstance(child, (ast.Expr, ast.Assign)):
            yield ".".join(names), child
        yield from _statements(child, names)


def _without(statement: ast.stmt) -> str | None:
    """What is left of a statement that waits for something, or lets others wait."""
    call = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    if call.func.attr not in NAMES or isinstance(call.func.value, ast.Constant):
        return None
    if isinstance(statement, ast.Assign):
        return "pass" if call.func.attr == "mark" else None
    inner = call.func.value
    starts = isinstance(inner, ast.Call) and call.func.attr == "wait"
    return ast.unparse(inner) if starts else "pass"  # a collective is started all the same


def caught_by(mutation: Mutation) -> str:
    """The program that fails without the statement, and how; empty: none does."""
    with tempfile.TemporaryDirectory(prefix="fullshard-mutation-") as folder:
        copy = Path(folder) / "fullshard"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / mutation.path).write_text(mutation.source, "utf-8")
        environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        child = subprocess.run(
            [sys.executable, "-m", "tests.lanes.run"],
            env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
    if child.returncode == 0:
        return ""
    lines = [line for line in child.stdout.splitlines() if line.startswith("CAUGHT ")]
    if not lines:
        raise RuntimeError(child.stderr)
    return lines[0].removeprefix("CAUGHT ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", default="", help="only files with this in their path")
    parser.add_argument("--markdown", action="store_true", help="print a table")
    parser.add_argument("--list", action="store_true", help="only list what would be taken away")
    options = parser.parse_args()
    missed = 0
    for mutation in mutations():
        if options.path not in mutation.path:
            continue
        caught = "" if options.list else caught_by(mutation)
        missed += not caught
        if options.markdown:
            place = f"`{mutation.path}` `{mutation.where}`"
            print(f"| {place} | `{mutation.text}` | {caught or 'NOBODY'} |", flush=True)
        else:
            print(f"{mutation.path}:{mutation.line}  {mutation.text}  -> {caught}", flush=True)
    return int(missed > 0 and not options.list)


if __name__ == "__main__":
    sys.exit(main())
