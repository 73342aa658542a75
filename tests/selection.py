"""The tests that ``make test`` leaves out, because other tests notice the same defects.

``tests/left_out.txt`` lists them, an id on each line; ``python -m tests.mutants`` writes it. A test
that is not listed runs, so every new test does. ``make test-all`` runs all tests.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["BUDGETS", "LEFT_OUT", "left_out"]

LEFT_OUT = Path(__file__).with_name("left_out.txt")

BUDGETS = {"ranks": 450, "pure": 300, "docs": 110, "faults": 60, "frameworks": 40, "lanes": 40}
"""Seconds that the tests of a folder may take in ``make test``, of all workers together."""


def left_out() -> frozenset[str]:
    """Return the ids of the tests that ``make test`` leaves out."""
    return frozenset(LEFT_OUT.read_text().splitlines())
