"""Runs all tests on a copy that notes the blocks it enters."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.rewriting import Copy, rewrite

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "mutants"
_SOURCE = FOLDER / "source"
_RECORDS = FOLDER / "records"
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "runs", ".*_cache")


@dataclass(frozen=True)
class Record:
    """What a test did when all tests ran.

    Attributes:
        test: its id.
        seconds: its time, with fixtures that it was the first to ask for.
        failed: whether it failed. Some tests do on any copy, such as those of the source itself.
        blocks: numbers of the blocks that it entered.
    """

    test: str
    seconds: float
    failed: bool
    blocks: frozenset[int]


def copied(name: str) -> Path:
    """Copy the repository to a folder of ``build/mutants``."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT, folder, ignore=_ignored)
    (folder / ".venv").symlink_to(sys.prefix)  # for tests of commands of the Makefile
    return folder


def rewritten(folder: Path, chosen: Collection[int] = (), *, marked: bool = False) -> Copy:
    """Rewrite the package in ``folder``, a copy of the repository; see ``rewrite``.

    The source is that of the last ``record``, as blocks are known by their numbers.
    """
    return rewrite(_SOURCE, folder / "src" / "fullshard", chosen, marked=marked)


def _ignored(folder: str, names: list[str]) -> set[str]:
    return set(_NOT_COPIED(folder, names)) if Path(folder) == ROOT else {"__pycache__"}


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment in which ``import fullshard`` finds the copy in ``folder``."""
    paths = os.pathsep.join([str(folder / "src"), str(folder)])
    return os.environ | {"PYTHONPATH": paths} | more


def record(options: argparse.Namespace) -> None:
    """Run all tests that have no record in ``build/mutants/records`` yet."""
    if not _RECORDS.exists():
        shutil.rmtree(_SOURCE, ignore_errors=True)
        shutil.copytree(ROOT / "src" / "fullshard", _SOURCE)
        _RECORDS.mkdir()
    folder = copied("marked")
    found = rewritten(folder, marked=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.recorder"]
    command += ["--numprocesses", str(options.workers), "--dist=worksteal"]
    command += ["--chosen"] * options.chosen
    blocks = str(found.num_blocks)
    env = environment(folder, FULLSHARD_RECORDS=str(_RECORDS), FULLSHARD_BLOCKS=blocks)
    subprocess.run(command, cwd=folder, env=env, check=False)


def recorded() -> list[Record]:
    """Return what all tests did, in the order of their ids."""
    return sorted(_read(), key=lambda each: each.test)


def _read() -> Iterator[Record]:
    for path in _RECORDS.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            facts = json.loads(line)
            yield Record(**facts | {"blocks": frozenset(facts["blocks"])})
