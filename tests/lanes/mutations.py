"""Deletes each join, wait, mark and event of the source in turn: the checker must notice.

    python -m tests.lanes.mutations                 # all of them; takes minutes
    python -m tests.lanes.mutations engine/unshard  # those in files with this in their path
    python -m tests.lanes.mutations --markdown      # as a table

If no program fails without a statement, the statement is superfluous, or ``programs`` lacks a
program that needs the statement.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest  # noqa: F401 - these take the longest to import, and are the same for all
import torch.distributed.tensor
import torch.testing._internal.distributed.fake_pg
import torch.utils.checkpoint  # noqa: F401

_TIMEOUT_S = 600.0
SOURCE = Path(__file__).parents[2] / "src" / "fullshard"
FOLDERS = ("device", "comm", "engine", "optim", "frontend")
NAMES = frozenset("join wait wait_event wait_stream mark record synchronize".split())
TRANSPORTS = frozenset(
    f"comm/{name}.py"
    for name in (
        "arena c10d columns handshake labels local_peer means native public rendezvous"
        " shared twolevel"
    ).split()
)
"""Files that carry bytes; the checker looks at the calls of them."""
DRY = frozenset({"comm/dry.py", "device/dry.py"})
"""Files of dry runs, in which nothing can race."""
STORES = frozenset({"comm/own_store.py", "comm/store_round.py"})
"""Files whose waits are for a store."""
EXEMPT = {
    ("Lanes.wait", "pending.wait()"): "on a CPU",
    ("Heartbeat.end", "self._thread.join(2 * BEAT_S)"): "a thread that writes nothing",
    ("Engine.act_all", "self.lanes.join(Lane.COMPUTE, Lane.GATHER)"): "for CUDA graphs",
    ("relative_error", "torch.accelerator.synchronize()"): "measures for people",
    ("Engine._hear", "self.recorder.record(Event(trigger, actions))"): "records for people",
    **dict.fromkeys(
        (
            (
                "all_reduce",
                "issued(group, there.device.type, 'sum', start, nbytes=there.nbytes).wait()",
            ),
            ("all_to_all", "issued(group, there.type, 'exchange', start).wait()"),
        ),
        "of the process group itself, which plays no stream here",
    ),
}


class Mutation(NamedTuple):
    """A statement and its replacement."""

    path: str  # relative to the package
    line: int
    where: str  # class and function
    text: str
    source: str  # of the whole file, mutated


def mutations() -> Iterator[Mutation]:
    """Yield all mutations, file by file."""
    for folder in FOLDERS:
        for file in sorted((SOURCE / folder).rglob("*.py")):
            path = file.relative_to(SOURCE).as_posix()
            if path not in TRANSPORTS | DRY | STORES:
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
    """Return a waiting or recording statement without its effect; None for other statements."""
    # ``Engine.join`` and the like are methods of classes.
    call = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    of = call.func.value
    is_class = isinstance(of, ast.Name) and of.id[:1].isupper()
    if call.func.attr not in NAMES or is_class:
        return None
    if isinstance(statement, ast.Assign):
        return "pass" if call.func.attr == "mark" else None
    starts = isinstance(of, ast.Call) and call.func.attr == "wait"
    return ast.unparse(of) if starts else "pass"  # a collective is started all the same


def caught_by(mutation: Mutation) -> str:
    """The program that fails without the statement, and how; empty: none does."""
    with tempfile.TemporaryDirectory(prefix="fullshard-mutation-") as folder:
        copy = Path(folder) / "fullshard"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / mutation.path).write_text(mutation.source, "utf-8")
        ours, theirs = Pipe()
        child = get_context("fork").Process(target=_run, args=(folder, theirs))
        child.start()  # with PyTorch imported, and fullshard not
        caught: str = ours.recv() if ours.poll(_TIMEOUT_S) else "a hang"
        child.kill()
        child.join()
    return caught


def _run(folder: str, pipe: Connection) -> None:
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    from tests.lanes.run import first_failure

    pipe.send(first_failure())


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
