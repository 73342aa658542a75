"""Layouts: the place of each parameter element on each rank. Integers only, no torch.

A `Layout` is a frozen value, equal on all ranks. Everything that must hold across ranks, such as
"each element has exactly one owner", is arithmetic on that value. The arithmetic is checked when
the layout is built, without a process group. All offsets, lengths and strides count elements, never
bytes.

                      PerParameter().build(params, world, align)
    ParamSpec, ... ->                                            -> Layout
                      Ragged().build(params, world, align)

    Layout.segments_of(rank)       the segments of all parameters in a rank's shard.
    Layout.local_shape(rank, i)    the shape of a rank's local tensor.
    Layout.unsharded_offsets       the offset of each parameter in the unsharded buffer.
    Layout.copies(row)             the strided copies between parameters and gathered shards.
    Layout.describe()              the padding and the cuts as text; also ``print(layout)``.
    subset(layout, params)         the layout of some of the parameters, without room for the rest.

The example has two parameters, w of shape (5, 2) and b of shape (5,), on 2 ranks with align=2. A
dot is an element of padding.

    PerParameter   rank 0  w0 w1 w2 w3 w4 w5 | b0 b1 b2 .       cut between rows, as DTensor does
                   rank 1  w6 w7 w8 w9 .  .  | b3 b4 .  .
    Ragged         rank 0  w0 w1 w2 w3 w4 w5 w6 w7              end to end, cut anywhere
                   rank 1  w8 w9 | b0 b1 b2 b3 b4 .

`Ragged` may also leave rows, blocks or parameters uncut. It then plans their places in four
modules. `packing` states the problem, and `bound` proves a lower bound on the length of shards.
`orders` packs shards of a given length, and `planner` finds the length.
"""

from fullshard.layout.fused import Slot, even_from, in_rows, plan_slots
from fullshard.layout.gather import GatherPlan, plan_gather, plan_param_gather
from fullshard.layout.layout import Layout, LayoutStrategy
from fullshard.layout.per_param import PerParameter
from fullshard.layout.ragged import Granularity, Ragged
from fullshard.layout.segment import Band, Segment, StridedCopy
from fullshard.layout.spec import ParamSpec, round_up
from fullshard.layout.subset import subset
