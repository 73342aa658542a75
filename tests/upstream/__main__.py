"""``python -m tests.upstream FOLDER``: every test on both engines, and what came of it."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SKIPPED = 77
KINDS = {
    "private names": r"there is none; docs/compat|can only be read|there is none; use"
    r"|has no attribute '_|fullshard that fullshard shards",
    "wording": r"AssertionError: .*(does not match|not found in|Regex didn't match)|not triggered",
}
"""Words of the error by which a failure on our engine is sorted; anything else is "other"."""


class Result(NamedTuple):
    """What a test did on one engine: ok, skipped, FAILED or hangs, and the last error."""

    what: str
    error: str = ""


def run(engine: str, file: Path, test: str, timeout_s: float) -> Result:
    """Run one test in a process of its own, with the ranks that it starts."""
    command = [sys.executable, "-m", "tests.upstream.stand_in", engine, str(file), test]
    paths = (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            _, printed = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return Result("hangs", f"no end after {timeout_s:.0f} s")
    what = {0: "ok", SKIPPED: "skipped"}.get(process.returncode, "FAILED")
    errors = re.findall(r"^\w[\w.]*(?:Error|Exception|Warning|Exit|Skip): .*$", printed, re.M)
    own = [error for error in errors if "exited with" not in error and "Process" not in error]
    return Result(what, (own or errors or [""])[-1] if what == "FAILED" else "")


def kind_of(error: str) -> str:
    """Sort a failure by its error."""
    return next((kind for kind, words in KINDS.items() if re.search(words, error)), "other")


def tests_of(file: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.upstream.stand_in", "torch", str(file), ""]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"{file.name}: cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    yield from done.stdout.split() if not done.returncode else ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with PyTorch's test files")
    parser.add_argument("-k", default="", help="only tests whose names have this word")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for a test")
    parser.add_argument("--at-once", type=int, default=2, help="tests that run at the same time")
    given = parser.parse_args()
    rows = []
    for file in sorted(given.folder.glob("test_*.py")):
        names = [name for name in tests_of(file) if given.k in name]
        counted: Counter[str] = Counter()

        def both(name: str, file: Path = file) -> tuple[str, Result, Result]:
            theirs = run("torch", file, name, given.timeout)
            is_ok = theirs.what == "ok"
            ours = run("fullshard", file, name, given.timeout) if is_ok else Result("not run")
            return name, theirs, ours

        with ThreadPoolExecutor(given.at_once) as pool:
            for name, theirs, ours in pool.map(both, names):
                counted[f"torch {theirs.what}"] += 1
                if theirs.what == "ok":
                    kind = ours.what if ours.what in ("ok", "hangs") else kind_of(ours.error)
                    counted[f"fullshard {kind}"] += 1
                    if kind != "ok":
                        print(f"{kind}: {file.stem} {name}: {ours.error[:200]}", flush=True)
                else:
                    print(f"not counted: {file.stem} {name}: {theirs.error[:120]}", flush=True)
        kinds = ("ok", *KINDS, "other", "hangs")
        cells = [counted["torch ok"], *(counted[f"fullshard {kind}"] for kind in kinds)]
        rows.append(f"| {file.stem} | {' | '.join(map(str, cells))} |")
    print(f"\n| file | PyTorch | fullshard | {' | '.join(KINDS)} | other | hangs |")
    print(f"|---|{'---|' * (len(KINDS) + 4)}")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
