"""How shards become whole parameters: what an all-gather can write in place, and what it cannot."""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.layout.layout import Layout
from fullshard.layout.segment import StridedCopy

__all__ = ["Direct", "GatherPlan", "plan_gather"]


@dataclass(frozen=True, slots=True)
class Direct:
    """A part of the shards that, gathered in rank order, is a part of the unsharded buffer.

    Attributes:
        shard_offset: its first element in each shard.
        numel: its elements in each shard.
        unsharded_offset: its first element in the unsharded buffer.
    """

    shard_offset: int
    numel: int
    unsharded_offset: int


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """The all-gathers of a bucket, which travel together.

        w of shape (4, 2) and b of shape (3,), 2 ranks, align=4, where w is large enough

        shard of rank 0   b0 b1 .  .  | w0 w1 w2 w3        b is gathered to a staging buffer and
        shard of rank 1   b2 .  .  .  | w4 w5 w6 w7        copied, w to where it belongs

    Attributes:
        staged_numel: leading elements of each shard that are gathered to a staging buffer, one
            rank after the other; 0 if there are none.
        copies: from there to the unsharded buffer.
        direct: the rest, gathered in place.
    """

    staged_numel: int
    copies: tuple[StridedCopy, ...]
    direct: tuple[Direct, ...]


def plan_gather(layout: Layout, *, min_numel: int) -> GatherPlan:
    """Gather in place what can be, if a rank's piece of it has at least ``min_numel`` elements.

    Each part that travels by itself costs time on all ranks, so small ones are better copied.
    """
    if layout.zero_copy:
        return GatherPlan(0, (), (Direct(0, layout.shard_numel, 0),))
    staged_numel = layout.shard_numel
    direct = []
    for param in sorted(_kept(layout), key=lambda p: -layout.bands[p][0].segment.shard_offset):
        band = layout.bands[param][0]
        part = band.segment
        if band.num_ranks < layout.world or part.count > 1 or part.length < min_numel:
            break
        staged_numel = part.shard_offset
        direct.append(Direct(part.shard_offset, part.length, layout.unsharded_offsets[param]))
    copies = layout.copies(staged_numel, below=staged_numel) if staged_numel else ()
    return GatherPlan(staged_numel, copies, tuple(direct[::-1]))


def _kept(layout: Layout) -> list[int]:
    """Parameters that are not empty."""
    return [param for param, spec in enumerate(layout.params) if spec.numel]
