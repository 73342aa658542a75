"""Which mutants the chosen tests kill; tests that kill more are added."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.mutants.choosing import keep, kept
from tests.mutants.recording import FOLDER, Record, copied, environment, recorded, rewritten
from tests.mutants.rewriting import Mutant, sample

_KILLS = FOLDER / "kills.jsonl"
_CHOSEN_S, _OTHERS_S = 120.0, 240.0
"""Of the tests that enter a mutant's block, the cheapest of together so many seconds run."""

_PATIENCE = 4.0  # a mutant that takes so many times the recorded time is killed: it hangs


@dataclass(frozen=True)
class _Try:
    """What came of a mutant.

    Attributes:
        verdict: "killed by chosen tests", "killed by other tests", "survived" or "not entered".
        test: the test that killed it; "" if none did, or if the tests hung.
    """

    number: int
    place: str
    change: str
    verdict: str
    test: str = ""


def kill(options: argparse.Namespace) -> None:
    """Try mutants drawn at random, and add to the chosen tests those that kill what they do not."""
    folder = copied("mutants")
    drawn = sample(rewritten(folder).mutants, options.count)
    rewritten(folder, {one.number for one in drawn})
    records = [each for each in recorded() if not each.failed]
    chosen = kept()
    tried = {each.number: each for each in _tried()}
    todo = [one for one in drawn if one.number not in tried]
    with ThreadPoolExecutor(options.workers) as threads:
        for each in threads.map(partial(_try, folder, records, chosen), todo):
            tried[each.number] = each
            with _KILLS.open("a") as file:
                file.write(json.dumps(vars(each)) + "\n")
            print(each.place, each.change, each.verdict, each.test, flush=True)
    keep(chosen | {each.test for each in tried.values() if each.test})
    verdicts = [tried[one.number].verdict for one in drawn]
    for verdict in sorted(set(verdicts)):
        print(f"{verdicts.count(verdict)} of {len(drawn)} mutants: {verdict}")


def _tried() -> list[_Try]:
    lines = _KILLS.read_text().splitlines() if _KILLS.exists() else []
    return [_Try(**json.loads(line)) for line in lines]


def _try(folder: Path, records: Sequence[Record], chosen: Collection[str], one: Mutant) -> _Try:
    result = partial(_Try, one.number, one.place, one.change)
    entering = [each for each in records if one.block in each.blocks]
    if not entering:
        return result("not entered")
    among = [each for each in entering if each.test in chosen]
    others = [each for each in entering if each.test not in chosen]
    for tests, limit, verdict in (
        (among, _CHOSEN_S, "killed by chosen tests"),
        (others, _OTHERS_S, "killed by other tests"),
    ):
        affordable = _cheapest(tests, limit)
        killed, test = _run(folder, affordable, one) if affordable else (False, "")
        if killed:
            return result(verdict, test)
    return result("survived")


def _cheapest(tests: Sequence[Record], seconds: float) -> list[Record]:
    found: list[Record] = []
    for each in sorted(tests, key=lambda each: each.seconds):
        seconds -= each.seconds
        if seconds < 0 and found:
            break
        found.append(each)
    return found


def _run(folder: Path, tests: Sequence[Record], one: Mutant) -> tuple[bool, str]:
    """Return whether ``tests`` kill the mutant, and the one that does."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no"]
    command += [f"@{_list_of(tests, one)}"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(folder, FULLSHARD_MUTANT=str(one.number)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=60 + _PATIENCE * sum(each.seconds for each in tests))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return True, ""
    failed = [line for line in out.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    test = failed[0].partition(" ")[2].partition(" - ")[0] if failed else ""
    return process.returncode != 0, test


def _list_of(tests: Sequence[Record], one: Mutant) -> Path:
    path = FOLDER / f"tests-of-{one.number}.txt"
    path.write_text("\n".join(each.test for each in tests) + "\n")
    return path
