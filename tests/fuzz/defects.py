"""Defects planted on purpose, each of which the fuzzer has to find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any
from unittest import mock

from fullshard.engine import Unit
from fullshard.engine.reduce import Gradients
from tests.fuzz.case import Case
from tests.fuzz.run import run_cases

__all__ = ["DEFECTS", "run_with_defect"]

Changed = Callable[..., Any]


def _scaled_gradients(plain: Changed) -> Changed:
    """Reductions that are off by a millionth."""

    @wraps(plain)
    def changed(self: Gradients, row: Any) -> None:
        plain(self, row)
        row.mul_(1 + 1e-6)

    return changed


def _lost_gradients(plain: Changed) -> Changed:
    """What waited for a backward that reduces is forgotten."""

    @wraps(plain)
    def changed(self: Gradients) -> Any:
        self.pending = [None] * len(self.pending)
        return plain(self)

    return changed


def _lost_partial_sums(plain: Changed) -> Changed:
    """What waited for the replicas is forgotten."""

    @wraps(plain)
    def changed(self: Gradients) -> Any:
        self._partial = None
        return plain(self)

    return changed


def _unseen_writes(plain: Changed) -> Changed:
    """What is in memory is used on, although shards were changed."""
    return lambda self: False


DEFECTS: dict[str, tuple[type, str, Callable[[Changed], Changed]]] = {
    "scaled gradients": (Gradients, "_edit", _scaled_gradients),
    "lost gradients": (Gradients, "_take", _lost_gradients),
    "lost partial sums": (Gradients, "_end_first_half", _lost_partial_sums),
    "unseen writes": (Unit, "was_written", _unseen_writes),
}


def run_with_defect(cases: Sequence[int | Case], log: str, defect: str) -> int:
    """``run_cases``, while a method does something else."""
    cls, name, change = DEFECTS[defect]
    with mock.patch.object(cls, name, change(getattr(cls, name))):
        return run_cases(cases, log)
