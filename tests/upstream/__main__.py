"""``python -m tests.upstream FOLDER``: run every test on both engines; print a table."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.upstream.stand_in import Result

ROOT = Path(__file__).parents[2]
KINDS = {
    "private names": r"there is none; docs/compat|can only be read|there is none; use"
    r"|has no attribute '_|fullshard that fullshard shards|object has no setter",
    "documented": r"LOCAL_STATE_DICT is historical|expected a process group with|mesh of 2 dims"
    r"|no attribute 'local_shards'|torch.float32 != torch.float16|ranks run different collectives",
    "wording": r"AssertionError: .*(does not match|not found in|Regex didn't match)|not triggered",
}
"""Patterns that sort the errors of fullshard; an error without a match is "other"."""

OUTCOMES = ("ok", *KINDS, "skipped", "hangs", "other")


def run(engine: str, file: Path, given: argparse.Namespace) -> dict[str, Result]:
    """Run the tests of a file on one engine; return their results by name."""
    command = [sys.executable, "-m", "tests.upstream.stand_in", engine, str(file), given.k]
    paths = (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "RANKS": str(given.ranks),
    }
    done = subprocess.run(
        [*command, str(given.timeout), str(given.at_once)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        print(f"{file.name} on {engine}: {last}", flush=True)
    lines = (line for line in done.stdout.splitlines() if line.startswith('{"test"'))
    results = [Result(**json.loads(line)) for line in lines]
    return {one.test: one for one in results}


def kind_of(result: Result | None) -> str:
    """Return the column of the table for a result on fullshard."""
    if result is None:
        return "other"
    if result.what != "FAILED":
        return result.what
    return next((kind for kind, words in KINDS.items() if re.search(words, result.error)), "other")


def row_of(file: Path, given: argparse.Namespace) -> str:
    """Run a file on both engines; print the differences, and return its row of the table."""
    theirs = run("torch", file, given)
    passed = [name for name, one in theirs.items() if one.what == "ok"]
    for name, one in theirs.items():
        if one.what not in ("ok", "skipped"):
            print(f"not counted: {file.stem} {name}: {one.what} {one.error[:150]}", flush=True)
    ours = run("fullshard", file, given) if passed else {}
    kinds = {name: kind_of(ours.get(name)) for name in passed}
    for name, kind in kinds.items():
        if kind != "ok":
            error = ours[name].error if name in ours else "no result"
            print(f"{kind}: {file.stem} {name}: {error[:250]}", flush=True)
    counted = Counter(kinds.values())
    cells = [len(theirs), len(passed), *(counted[kind] for kind in OUTCOMES)]
    return f"| {file.stem} | {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of PyTorch's test files, or one file")
    parser.add_argument("-k", default="", help="only tests whose names have this word")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for a test")
    parser.add_argument("--ranks", type=int, default=2, help="number of devices that tests find")
    parser.add_argument("--at-once", type=int, default=2, help="number of simultaneous tests")
    given = parser.parse_args()
    files = sorted(given.folder.rglob("test_*.py")) if given.folder.is_dir() else [given.folder]
    rows = []
    for file in files:
        rows.append(row_of(file, given))
        print(rows[-1], flush=True)
    heads = ["file", "tests", "PyTorch", "fullshard", *OUTCOMES[1:]]
    print("", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows, sep="\n")


if __name__ == "__main__":
    main()
