"""The cheapest tests that enter every block that any test enters, and the list of the others."""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from tests.mutants.recording import FOLDER, Record, recorded
from tests.selection import LEFT_OUT

_CHOSEN = FOLDER / "chosen.json"
_ALWAYS = ("tests/pure/", "tests/docs/", "tests/lanes/", "tests/fuzz/", "tests/gpu/")
"""Folders whose tests all run: they are cheap, or show what no mutant of ``src`` could."""

_TIMES = 3
"""So many tests enter each block, where there are as many and the time allows it."""


def choose(options: argparse.Namespace) -> None:
    """Choose tests that enter all blocks, then more of them while the time allows it."""
    records = recorded()
    always = [each for each in records if each.failed or each.test.startswith(_ALWAYS)]
    chosen = cheapest(records, always, options.seconds)
    keep(chosen)
    known = {each.test: each for each in records}
    seconds = sum(known[test].seconds for test in chosen)
    print(f"{len(chosen):,} of {len(records):,} tests, {seconds:,.0f} s of work")


def cheapest(records: Sequence[Record], always: Collection[Record], seconds: float) -> set[str]:
    """Return tests that enter all blocks once, or more often within ``seconds``."""
    chosen = {each.test for each in always}
    spent = sum(each.seconds for each in always)
    entered = Counter(block for each in always for block in each.blocks)
    possible = Counter(block for each in records for block in each.blocks)
    for times in range(1, _TIMES + 1):
        open_blocks = {b for b, most in possible.items() if entered[b] < min(times, most)}
        left = [each for each in records if each.test not in chosen]
        while open_blocks and (times == 1 or spent < seconds):
            best = max(
                left, key=lambda each: len(each.blocks & open_blocks) / (each.seconds + 0.05)
            )
            left.remove(best)
            chosen.add(best.test)
            spent += best.seconds
            entered.update(best.blocks)
            open_blocks = {b for b in open_blocks if entered[b] < min(times, possible[b])}
    return chosen


def keep(chosen: Collection[str]) -> None:
    """Remember the chosen tests for the commands that follow."""
    _CHOSEN.write_text(json.dumps(sorted(chosen), indent=0))


def kept() -> set[str]:
    """Return the tests chosen so far."""
    return set(json.loads(_CHOSEN.read_text()))


def write(_options: argparse.Namespace) -> None:
    """Write ``tests/left_out.txt``: all recorded tests that were not chosen, by test."""
    chosen = kept()
    variants: dict[str, list[str]] = defaultdict(list)
    for each in recorded():
        if each.test not in chosen:
            name, _, variant = each.test.partition("[")
            variants[name].append(variant.removesuffix("]"))
    lines = [f"{name} {' '.join(found)}".rstrip() for name, found in sorted(variants.items())]
    LEFT_OUT.write_text("\n".join(lines) + "\n")
