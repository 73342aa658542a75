"""The instructions to the engine: a small vocabulary of interned values with a text form."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any


class Op(enum.StrEnum):
    """One kind of effect; the value is its text form. Traits follow the value."""

    starts: bool
    """True if it starts to communicate."""
    is_local: bool
    """True if it never waits for another rank."""
    gives_gradients: bool
    """True if it may leave presence flags of gradients to be read."""
    takes_gradients: bool
    """True if it takes gradients off the unsharded parameters."""

    def __new__(cls, text: str, *traits: str) -> Op:
        """Make a member from its text form and the names of the flags that are True for it."""
        op = str.__new__(cls, text)
        op._value_ = text
        for name in ("starts", "is_local", "gives_gradients", "takes_gradients"):
            setattr(op, name, name in traits)
        return op

    FENCE = "fence"
    """Make the communication that follows see the values that the optimizer wrote."""
    UNSHARD = "unshard", "starts"
    """Start the all-gathers of a unit."""
    WAIT = "wait"
    """Make the unsharded parameters usable and show them in the modules."""
    FINISH_GATHER = "finish_gather"
    """Wait for the gathers of a unit without showing it.

    The unit is then freed, concealed or gathered again.
    """
    CONCEAL = "conceal", "is_local"
    """Show the sharded parameters, but keep the unsharded storage."""
    RETAIN = "retain", "is_local"
    """Keep the unsharded memory for a graph that may read it on a path that we do not see."""
    RESHARD = "reshard", "is_local"
    """Show the sharded parameters and free the unsharded storage."""
    RESHARD_TO_SECONDARY = "reshard_to_secondary"
    """Reshard, but keep a secondary shard, from which fewer ranks gather again in backward."""
    REDUCE_SCATTER = "reduce_scatter", "starts", "takes_gradients"
    """Start the reduction of a unit's gradients, pending ones included, over the shards."""
    ALL_REDUCE = "all_reduce", "starts"
    """Continue with the reduction over the replicas, gradients that were kept partial included."""
    KEEP_PARTIAL = "keep_partial", "gives_gradients"
    """End a reduction before the replicas: keep gradients that are reduced over the shards only."""
    FINISH_REDUCE = "finish_reduce", "gives_gradients"
    """Put the reduced gradients on the sharded parameters, where the optimizer finds them."""
    ACCUMULATE = "accumulate", "takes_gradients"
    """Keep the gradients unsharded until a backward that reduces them (no-sync)."""
    DISCARD = "discard", "is_local", "takes_gradients"
    """Forget the gradients of a backward that died."""
    FORGET = "forget", "is_local", "takes_gradients"
    """Forget every gradient that was not fully reduced, pending ones included."""


@dataclass(frozen=True, slots=True)
class Action:
    """One effect on one unit (``unit`` is None for an effect on all units)."""

    op: Op
    unit: int | None = None

    def __str__(self) -> str:
        return self.op.value if self.unit is None else f"{self.op.value} {self.unit}"


@cache
def actions_of(unit: int) -> Any:
    """Return the interned actions of a unit, as attributes named like the members of ``Op``.

    A unit looks its actions up once instead of building them at each step.
    """
    return SimpleNamespace(**{op.value: Action(op, unit) for op in Op})


FENCE = Action(Op.FENCE)
