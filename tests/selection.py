"""The tests that ``make test`` leaves out, because others enter the same code.

``tests/left_out.txt`` lists them, an id on each line; ``python -m tests.mutants`` writes it. A test
that is not listed runs, so every new test does. ``make test-all`` runs all tests.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["BUDGETS", "LEFT_OUT", "left_out"]

LEFT_OUT = Path(__file__).with_name("left_out.txt")

BUDGETS = {"ranks": 420, "pure": 320, "docs": 100, "faults": 60, "lanes": 50, "fuzz": 30}
"""Budget of each folder in ``make test``: seconds, summed over all workers."""


def left_out() -> frozenset[str]:
    """Return the ids of the tests that ``make test`` leaves out."""
    return frozenset(LEFT_OUT.read_text().splitlines())
