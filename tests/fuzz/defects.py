"""Deliberate defects; the fuzzer has to find each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

from fullshard.checkpoint.saving import saving
from fullshard.engine import Unit
from fullshard.engine.reduce import Gradients
from fullshard.frontend.places import Places
from tests.fuzz.case import Case
from tests.fuzz.run import run_cases

Changed = Callable[..., Any]


def _scaled_gradients(plain: Changed) -> Changed:
    """Make reduced gradients wrong by a factor of 1 + 1e-6."""

    @wraps(plain)
    def changed(self: Gradients, spec: Any, row: Any) -> None:
        plain(self, spec, row)
        row.mul_(1 + 1e-6)

    return changed


def _lost(name: str, plain: Changed) -> Changed:
    """Forget gradients that wait for a later backward ("pending") or all-reduce ("partial")."""

    @wraps(plain)
    def changed(self: Gradients) -> Any:
        setattr(self._waiting, name, None)
        return plain(self)

    return changed


def _unseen_writes(plain: Changed) -> Changed:
    """Keep using unsharded parameters after their shards were changed."""
    return lambda self: False


def _broken_ties(plain: Changed) -> Changed:
    """Leave a parameter that was tied after sharding as a copy with a shard of its own."""
    return lambda self, targets: None


def _unseen_differences(plain: Changed) -> Changed:
    """Save one rank's value of a replicated tensor although the ranks' values differ."""
    return lambda consensus, keys: None


class Defect(NamedTuple):
    """A replacement for a method of ``cls``, or for a function of a module."""

    cls: type | ModuleType
    method: str
    change: Callable[[Changed], Changed]
    shown_by: tuple[str, ...] = ()
    """Texts that all occur in a case which can reveal the defect."""


DEFECTS = {
    "scaled gradients": Defect(Gradients, "_edit", _scaled_gradients),
    "lost gradients": Defect(Gradients, "_take", partial(_lost, "pending"), ("sync=False",)),
    "lost partial sums": Defect(
        Gradients, "_end_first_half", partial(_lost, "partial"), ("partial=True",)
    ),
    "unseen writes": Defect(
        Unit, "was_written", _unseen_writes, ("'set_reshard_after_backward', args=(False", "edit")
    ),
    "broken ties": Defect(Places, "_point", _broken_ties, ("'tie'", "face='modules'")),
    "unseen differences": Defect(
        saving, "refuse_apart", _unseen_differences, ("'store'", "differing='weight'")
    ),
}


def run_with_defect(cases: Sequence[int | Case], log: str, defect: str) -> int:
    """Run cases with one defect in place."""
    cls, method, change, _ = DEFECTS[defect]
    with mock.patch.object(cls, method, change(getattr(cls, method))):
        return run_cases(cases, log)
