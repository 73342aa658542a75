"""The instructions to the engine: a small vocabulary of interned values with a text form."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple


class Op(enum.StrEnum):
    """One kind of effect; the value is its text form."""

    FENCE = "fence"
    """Make the communication that follows see the values that the optimizer wrote."""
    UNSHARD = "unshard"
    """Start the all-gathers of a unit."""
    WAIT = "wait"
    """Make the unsharded parameters usable and show them in the modules."""
    CONCEAL = "conceal"
    """Show the sharded parameters, but keep the unsharded storage."""
    RESHARD = "reshard"
    """Show the sharded parameters and free the unsharded storage."""
    RESHARD_TO_SECONDARY = "reshard_to_secondary"
    """Reshard, but keep a secondary shard, from which fewer ranks gather again in backward."""
    REDUCE_SCATTER = "reduce_scatter"
    """Start the reduction of a unit's gradients, pending ones included, over the shards."""
    ALL_REDUCE = "all_reduce"
    """Continue with the reduction over the replicas, gradients that were kept partial included."""
    KEEP_PARTIAL = "keep_partial"
    """End a reduction before the replicas: keep gradients that are reduced over the shards only."""
    FINISH_REDUCE = "finish_reduce"
    """Put the reduced gradients on the sharded parameters, where the optimizer finds them."""
    ACCUMULATE = "accumulate"
    """Keep the gradients unsharded until a backward that reduces them (no-sync)."""
    DISCARD = "discard"
    """Forget the gradients of a backward that died."""
    FORGET = "forget"
    """Forget every gradient that was not fully reduced, pending ones included."""


@dataclass(frozen=True, slots=True)
class Action:
    """One effect on one unit (``unit`` is None for an effect on all units)."""

    op: Op
    unit: int | None = None

    def __str__(self) -> str:
        return self.op.value if self.unit is None else f"{self.op.value} {self.unit}"

    @staticmethod
    def parse(text: str) -> Action:
        """Return the interned action whose text form, ``str(action)``, is ``text``."""
        op, _, unit = text.partition(" ")
        return _intern(Op(op), int(unit) if unit else None)


@cache
def _intern(op: Op, unit: int | None) -> Action:
    return Action(op, unit)


class UnitActions(NamedTuple):
    """Every action of one unit, looked up once instead of built at each step."""

    unshard: Action
    wait: Action
    conceal: Action
    reshard: Action
    reshard_to_secondary: Action
    reduce_scatter: Action
    all_reduce: Action
    keep_partial: Action
    finish_reduce: Action
    accumulate: Action
    discard: Action
    forget: Action


@cache
def actions_of(unit: int) -> UnitActions:
    """Return the interned actions of the unit with this key."""
    return UnitActions(*(_intern(Op(name), unit) for name in UnitActions._fields))


FENCE = _intern(Op.FENCE, None)
