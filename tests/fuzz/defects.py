"""Defects planted on purpose, each of which the fuzzer has to find."""

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
    """Reductions that are off by a millionth."""

    @wraps(plain)
    def changed(self: Gradients, spec: Any, row: Any) -> None:
        plain(self, spec, row)
        row.mul_(1 + 1e-6)

    return changed


def _lost(name: str, plain: Changed) -> Changed:
    """Gradients that wait are forgotten: for a backward that reduces, or for the replicas."""

    @wraps(plain)
    def changed(self: Gradients) -> Any:
        setattr(self._waiting, name, None)
        return plain(self)

    return changed


def _unseen_writes(plain: Changed) -> Changed:
    """What is in memory is used on, although shards were changed."""
    return lambda self: False


def _broken_ties(plain: Changed) -> Changed:
    """A parameter that was tied after sharding is a copy with a shard of its own again."""
    return lambda self, targets: None


def _unseen_differences(plain: Changed) -> Changed:
    """Replicas that differ by rank are saved, one rank's for all."""
    return lambda council, keys: None


class Defect(NamedTuple):
    """A method of ``cls``, or a function of a module, that does something else."""

    cls: type | ModuleType
    method: str
    change: Callable[[Changed], Changed]
    shown_by: tuple[str, ...] = ()
    """What stands in a case that can show it."""


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
    """``run_cases``, while a method does something else."""
    cls, method, change, _ = DEFECTS[defect]
    with mock.patch.object(cls, method, change(getattr(cls, method))):
        return run_cases(cases, log)
