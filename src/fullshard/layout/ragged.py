"""`Ragged`: parameters end to end in one buffer that is cut into equal shards, with no copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.errors import NotBuiltError
from fullshard.layout.layout import Layout
from fullshard.layout.segment import Band, Segment
from fullshard.layout.spec import ParamSpec, check_build, pack, round_up

__all__ = ["Ragged"]


@dataclass(frozen=True, slots=True)
class Ragged:
    """Lay the parameters end to end and cut that buffer into equal shards.

        w of shape (5, 2), b of shape (5,), 2 ranks, align=2

        unsharded   w0 w1 w2 w3 w4 w5 w6 w7 | w8 w9 b0 b1 b2 b3 b4 .
                    ------- rank 0 -------- | ------- rank 1 --------

    The shards, one rank after the other, are the unsharded buffer, so gathering and reducing
    rearrange nothing (`Layout.zero_copy`). In exchange a rank keeps some elements of a parameter
    and not a piece of one of its dims.

    Attributes:
        granularity: where a parameter may be cut: ``"element"`` means anywhere.

    Raises:
        NotBuiltError: for any other granularity.
    """

    granularity: str = "element"

    def __post_init__(self) -> None:
        if self.granularity != "element":
            raise NotBuiltError(
                f"Ragged: got granularity={self.granularity!r}, expected 'element', the only one "
                "built so far"
            )

    def build(self, params: Sequence[ParamSpec], world: int, align: int) -> Layout:
        """Lay `params` out over `world` ranks.

        Args:
            params: what to lay out; 0-dim parameters are one element, `shard_dim` is ignored.
            world: number of ranks, at least 1.
            align: each parameter, and each shard, starts at a multiple of this many elements.

        Raises:
            LayoutError: if `world` or `align` is less than 1.
        """
        check_build(world=world, align=align)
        offsets, end = pack([spec.numel for spec in params], align)
        shard_numel = round_up(round_up(end, world) // world, align)
        return Layout(
            params=tuple(params),
            world=world,
            shard_numel=shard_numel,
            unsharded_numel=world * shard_numel,
            unsharded_offsets=offsets,
            bands=tuple(
                _bands(index, offset, spec.numel, world=world, shard_numel=shard_numel)
                for index, (spec, offset) in enumerate(zip(params, offsets, strict=True))
            ),
        )


def _bands(
    index: int, offset: int, numel: int, *, world: int, shard_numel: int
) -> tuple[Band, ...]:
    """Cut ``[offset, offset + numel)`` of the unsharded buffer at the borders of the shards.

    Such an interval starts within one rank, fills the next ranks and ends within another; the
    ranks it fills are alike:

        | ... 0 1 | 2 3 4 5 6 | 7 8 9 10 11 | 12 13 ... |     shard_numel=5, numel=14
           head        filled, 2 ranks          tail
    """
    if not numel:
        return (Band(0, world, Segment(index, 0, 0, 1, 0, 0), local_shape=(0,)),)
    before, within = divmod(offset, shard_numel)
    head = min(shard_numel - within, numel) if within else 0
    filled, tail = divmod(numel - head, shard_numel)
    has_head, has_tail = int(head > 0), int(tail > 0)
    after = world - before - has_head - filled - has_tail
    rank = start = 0
    bands = []
    for num_ranks, length, shard_offset in (
        (before, 0, 0),
        (has_head, head, within),
        (filled, shard_numel, 0),
        (has_tail, tail, 0),
        (after, 0, 0),
    ):
        if num_ranks:
            segment = Segment(index, start, length, 1, numel, shard_offset)
            bands.append(Band(rank, num_ranks, segment, local_shape=(length,)))
        rank += num_ranks
        start += num_ranks * length
    return tuple(bands)
