"""Runs all tests on a copy of the source that notes the blocks it enters."""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.rewriting import Inventory, rewrite

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "mutants"
_PACKAGE = ROOT / "src" / "fullshard"
_SOURCE = FOLDER / "source"
_RECORDS = FOLDER / "records"
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "runs", ".*_cache")


@dataclass(frozen=True)
class Record:
    """The time of one test, and the code that it entered.

    Attributes:
        test: its id.
        seconds: its time, with shared fixtures that it was the first to use.
        failed: whether it failed. Tests that read the source fail on every rewritten copy.
        skipped: whether it was skipped, on this machine and this version of PyTorch.
        blocks: numbers of the blocks that it entered.
    """

    test: str
    seconds: float
    failed: bool
    skipped: bool
    blocks: frozenset[int]


def make_copy(name: str) -> Path:
    """Copy the repository to a folder of ``build/mutants``."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT, folder, ignore=_ignored)
    (folder / ".venv").symlink_to(sys.prefix)  # tests of Makefile commands need it
    return folder


def rewrite_copy(folder: Path, mutants: Collection[int] = (), *, marked: bool = False) -> Inventory:
    """Rewrite the package in ``folder``, a copy of the repository; see ``rewrite``.

    The source is that of the last ``record``, as numbers of blocks are valid for it only.

    Raises:
        SystemExit: ``src`` has changed since.
    """
    names = [str(path.relative_to(_SOURCE)) for path in _SOURCE.rglob("*.py")]
    _, changed, missing = filecmp.cmpfiles(_SOURCE, _PACKAGE, names, shallow=False)
    if changed or missing or len(names) != len([*_PACKAGE.rglob("*.py")]):
        raise SystemExit(
            f"src has changed since the last record: delete {FOLDER}, and record again"
        )
    return rewrite(_SOURCE, folder / "src" / "fullshard", mutants, marked=marked)


def _ignored(folder: str, names: list[str]) -> set[str]:
    return set(_NOT_COPIED(folder, names)) if Path(folder) == ROOT else {"__pycache__"}


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment in which ``import fullshard`` finds the copy in ``folder``."""
    paths = os.pathsep.join([str(folder / "src"), str(folder)])
    return os.environ | {"PYTHONPATH": paths} | more


def record(options: argparse.Namespace) -> None:
    """Run all tests that have no record in ``build/mutants/records`` yet."""
    if not _RECORDS.exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        shutil.copytree(_PACKAGE, _SOURCE, ignore=shutil.ignore_patterns("__pycache__"))
        _RECORDS.mkdir()
    folder = make_copy("marked")
    found = rewrite_copy(folder, marked=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.plugin"]
    command += ["--numprocesses", str(options.workers), "--dist=worksteal"]
    command += ["--chosen"] * options.chosen
    blocks = str(found.num_blocks)
    env = environment(folder, FULLSHARD_RECORDS=str(_RECORDS), FULLSHARD_BLOCKS=blocks)
    status = subprocess.run(command, cwd=folder, env=env, check=False).returncode
    if status > 1:
        raise SystemExit("pytest did not end: call record again")


def recorded() -> list[Record]:
    """Return the records of all tests, in the order of their ids."""
    return sorted(_read(), key=lambda each: each.test)


def _read() -> Iterator[Record]:
    for path in _RECORDS.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            facts = json.loads(line)
            yield Record(**facts | {"blocks": frozenset(facts["blocks"])})
