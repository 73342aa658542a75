"""WHERE: which element of which parameter lies at which place. Integers only, no torch.

A `Layout` is a frozen value, equal on all ranks. Everything that must hold across ranks, such as
"each element has exactly one owner", is arithmetic on that value and is checked when it is built,
with no process group. All offsets, lengths and strides count elements, never bytes.

                      PerParameter().build(params, world, align)
    ParamSpec, ... ->                                            -> Layout
                      Ragged().build(params, world, align)

    Layout.segments_of(rank)       what a rank's shard holds of each parameter
    Layout.local_shape(rank, i)    the shape of that rank's local tensor
    Layout.unsharded_offsets       where each parameter starts in the unsharded buffer
    Layout.copies(row)             the strided copies between parameters and gathered shards
    Layout.describe()              padding, and what is cut where; also ``print(layout)``
    subset(layout, params)         the same for some of the parameters, without room for the others
    remap(source, target)          the moves from one layout's shards to another's

The same two parameters, w of shape (5, 2) and b of shape (5,), on 2 ranks with align=2 (a dot is
an element of padding):

    PerParameter   rank 0  w0 w1 w2 w3 w4 w5 | b0 b1 b2 .       cut between rows, as DTensor does
                   rank 1  w6 w7 w8 w9 .  .  | b3 b4 .  .
    Ragged         rank 0  w0 w1 w2 w3 w4 w5 w6 w7              end to end, cut anywhere
                   rank 1  w8 w9 | b0 b1 b2 b3 b4 .

`Ragged` may also keep rows, blocks or whole parameters together. Where they then lie is planned, in
four steps: `packing` states the problem, `bound` proves how short shards can be, `orders` packs
shards of a given length, `planner` finds the length.
"""

from fullshard.layout.fused import Slot, even_from, in_rows, plan_slots
from fullshard.layout.gather import (
    Direct,
    GatherPlan,
    ParamGather,
    plan_gather,
    plan_param_gather,
)
from fullshard.layout.layout import Layout, LayoutStrategy
from fullshard.layout.per_param import PerParameter
from fullshard.layout.ragged import Granularity, Ragged
from fullshard.layout.remap import Move, remap
from fullshard.layout.segment import Band, Run, Segment, StridedCopy
from fullshard.layout.spec import ParamSpec, round_up
from fullshard.layout.subset import subset

__all__ = [
    "Band",
    "Direct",
    "GatherPlan",
    "Granularity",
    "Layout",
    "LayoutStrategy",
    "Move",
    "ParamGather",
    "ParamSpec",
    "PerParameter",
    "Ragged",
    "Run",
    "Segment",
    "Slot",
    "StridedCopy",
    "even_from",
    "in_rows",
    "plan_gather",
    "plan_param_gather",
    "plan_slots",
    "remap",
    "round_up",
    "subset",
]
