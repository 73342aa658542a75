"""Chooses the cheapest tests that enter every block, and lists the others."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Collection, Sequence

from tests.mutants.recording import FOLDER, Record, recorded
from tests.selection import LEFT_OUT, left_out

_CHOSEN = FOLDER / "chosen.json"
_ALWAYS = ("tests/pure/", "tests/docs/", "tests/lanes/", "tests/fuzz/", "tests/gpu/")
"""Folders whose tests all run: they are cheap, or test something outside ``src``."""

_TIMES = 3
"""Number of tests that should enter each block, if that many do and the time allows it."""


def choose(options: argparse.Namespace) -> None:
    """Choose tests that enter all blocks, then more of them while the time allows it."""
    records = recorded()
    chosen = cheapest(records, [each for each in records if _runs_always(each)], options.seconds)
    save_chosen(chosen)
    seconds = sum(each.seconds for each in records if each.test in chosen)
    print(f"{len(chosen):,} of {len(records):,} tests, {seconds:,.0f} s of work")


def _runs_always(one: Record) -> bool:
    """Return whether a test runs whatever blocks it enters."""
    return one.test.startswith(_ALWAYS) or one.failed or one.skipped or not one.blocks


def cheapest(records: Sequence[Record], always: Sequence[Record], seconds: float) -> set[str]:
    """Return ``always`` and tests that enter all blocks.

    Each block is entered once, then up to ``_TIMES`` times while the total is below ``seconds``.
    """
    chosen = {each.test for each in always}
    spent = sum(each.seconds for each in always)
    entered = Counter(block for each in always if not each.failed for block in each.blocks)
    possible = Counter(block for each in records if not each.failed for block in each.blocks)
    for times in range(1, _TIMES + 1):
        missing = {b for b, most in possible.items() if entered[b] < min(times, most)}
        left = [each for each in records if each.test not in chosen]
        while missing and (times == 1 or spent < seconds):
            best = max(left, key=lambda each: len(each.blocks & missing) / (each.seconds + 0.05))
            left.remove(best)
            chosen.add(best.test)
            spent += best.seconds
            entered.update(best.blocks)
            missing = {b for b in missing if entered[b] < min(times, possible[b])}
    return chosen


def save_chosen(tests: Collection[str]) -> None:
    """Write the ids of the chosen tests for the commands that follow."""
    _CHOSEN.write_text(json.dumps(sorted(tests), indent=0))


def load_chosen() -> set[str]:
    """Return the ids of the tests that were chosen so far."""
    return set(json.loads(_CHOSEN.read_text()))


def write(_options: argparse.Namespace) -> None:
    """Write the recorded tests that were not chosen, and those left out before, to the list."""
    others = {each.test for each in recorded()} | left_out()
    LEFT_OUT.write_text("".join(f"{test}\n" for test in sorted(others - load_chosen())))
