"""Runs the chosen tests on mutants, and adds tests that kill more."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.mutants.choosing import load_chosen, save_chosen
from tests.mutants.recording import FOLDER, Record, environment, make_copy, recorded, rewrite_copy
from tests.mutants.rewriting import Mutant, sample

_TRIES = FOLDER / "tries.jsonl"
_CHOSEN_S, _OTHERS_S = 120.0, 240.0
"""Time limits: the cheapest tests that enter the mutant's block run, up to this total."""

_PATIENCE = 4.0  # multiple of its recorded time, plus a minute, after which a test hangs
_NONE = -1  # a number that no mutant has


@dataclass(frozen=True)
class _Try:
    """The outcome of one mutant.

    Attributes:
        verdict: "killed by chosen tests", "killed by other tests", "hung", "survived", "not
            entered" by any test, or "not run" because pytest did not.
        test: the first test that failed.
    """

    number: int
    place: str
    change: str
    verdict: str
    test: str = ""

    @property
    def adds_test(self) -> bool:
        """True if the mutant was killed by a test that was not chosen before."""
        return self.verdict == "killed by other tests"


def kill(options: argparse.Namespace) -> None:
    """Try mutants drawn at random. Choose other tests too if they kill what the chosen ones miss.

    In the end, the tests that killed mutants run without any mutant. A kill does not count if its
    test fails there.
    """
    folder = make_copy("mutants")
    possible = rewrite_copy(folder).mutants
    drawn = sample(possible, options.count, options.seed)
    if rewrite_copy(folder, {one.number for one in drawn}).mutants != possible:
        raise SystemExit("mutants are numbered otherwise if some are in the copy: a defect of ours")
    records = [each for each in recorded() if not each.failed]
    tried = {each.number: each for each in _tried()}
    chosen = load_chosen() | {each.test for each in tried.values() if each.adds_test}
    todo = [one for one in drawn if one.number not in tried]
    with ThreadPoolExecutor(options.workers) as threads:
        for each in threads.map(partial(_try, folder, records, chosen), todo):
            tried[each.number] = each
            chosen |= {each.test} if each.adds_test else set()
            with _TRIES.open("a") as file:
                file.write(json.dumps(vars(each)) + "\n")
            print(each.place, each.change, each.verdict, each.test, flush=True)
    failing = _failing(folder, {each.test for each in tried.values() if each.test})
    save_chosen(chosen - (failing - load_chosen()))
    of_drawn = [tried[one.number] for one in drawn]
    verdicts = Counter("void" if each.test in failing else each.verdict for each in of_drawn)
    for verdict, number in sorted(verdicts.items()):
        print(f"{number} of {len(drawn)} mutants: {verdict}")


def _tried() -> list[_Try]:
    lines = _TRIES.read_text().splitlines() if _TRIES.exists() else []
    return [_Try(**json.loads(line)) for line in lines]


def _try(folder: Path, records: Sequence[Record], chosen: Collection[str], one: Mutant) -> _Try:
    result = partial(_Try, one.number, one.place, one.change)
    entering = [each for each in records if one.block in each.blocks]
    if not entering:
        return result("not entered")
    among = _cheapest([each for each in entering if each.test in chosen], _CHOSEN_S)
    others = _cheapest([each for each in entering if each.test not in chosen], _OTHERS_S)
    for tests, verdict in ((among, "killed by chosen tests"), (others, "killed by other tests")):
        if not tests:
            continue
        limit = 60 + _PATIENCE * sum(each.seconds for each in tests)
        status, failed = _run(folder, [each.test for each in tests], one.number, limit)
        if status is None:
            return result("hung")
        if status > 2:
            return result("not run")
        if status > 0:
            return result(verdict, next(iter(failed), ""))
    return result("survived")


def _cheapest(tests: Sequence[Record], seconds: float) -> list[Record]:
    found: list[Record] = []
    for each in sorted(tests, key=lambda each: each.seconds):
        seconds -= each.seconds
        if seconds < 0 and found:
            break
        found.append(each)
    return found


def _failing(folder: Path, tests: Collection[str]) -> set[str]:
    """Return those of ``tests`` that fail on the copy without a mutant."""
    if not tests:
        return set()
    _, failed = _run(folder, sorted(tests), _NONE, 3600, all_of_them=True)
    return failed & set(tests)


def _run(
    folder: Path, tests: Sequence[str], mutant: int, limit: float, *, all_of_them: bool = False
) -> tuple[int | None, set[str]]:
    """Return the exit status of pytest, None if it hung, and the tests that failed.

    Without ``all_of_them`` the first failure ends the run.
    """
    ids, out = (FOLDER / f"{kind}-of-{mutant}.txt" for kind in ("tests", "output"))
    ids.write_text("".join(f"{test}\n" for test in tests))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", f"@{ids}"]
    with out.open("w") as file:
        process = subprocess.Popen(
            command + ["-x"] * (not all_of_them),
            cwd=folder,
            env=environment(folder, FULLSHARD_MUTANT=str(mutant)),
            stdout=file,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        with suppress(ProcessLookupError):  # processes that tests left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = [line for line in out.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))]
    return status, {line.partition(" ")[2].partition(" - ")[0] for line in lines}
