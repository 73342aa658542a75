"""Which part of a unit carries out which action of the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fullshard.engine.reduce import Gradients
from fullshard.engine.unit import Unit
from fullshard.schedule import Op

ON_UNITS: dict[Op, Callable[[Unit], None]] = {
    Op.WAIT: Unit.finish_unshard,
    Op.CONCEAL: Unit.conceal,
    Op.RESHARD: Unit.reshard,
    Op.RESHARD_TO_SECONDARY: partial(Unit.reshard, to_secondary=True),
    Op.FORGET: Unit.forget,
}
"""Actions that a unit carries out alone; unsharding needs the engine."""

ON_GRADIENTS: dict[Op, Callable[[Gradients], None]] = {
    Op.REDUCE_SCATTER: Gradients.start,
    Op.ALL_REDUCE: Gradients.all_reduce,
    Op.KEEP_PARTIAL: Gradients.keep_partial,
    Op.FINISH_REDUCE: Gradients.finish,
    Op.ACCUMULATE: Gradients.accumulate,
    Op.DISCARD: Gradients.discard,
}
"""Actions on the gradients of each of a unit's buckets."""

BY_ITSELF = frozenset({Op.CONCEAL, Op.RESHARD, Op.DISCARD, Op.FORGET})
"""Actions that communicate nothing."""

STARTS = frozenset({Op.UNSHARD, Op.REDUCE_SCATTER, Op.ALL_REDUCE})
"""Actions that start to communicate."""

GIVES_GRADIENTS = frozenset({Op.FINISH_REDUCE, Op.KEEP_PARTIAL})

TAKES_GRADIENTS = frozenset({Op.REDUCE_SCATTER, Op.ACCUMULATE, Op.DISCARD, Op.FORGET})
