"""Gather plans: the parts of shards that an all-gather writes in place, and the parts it cannot."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fullshard.layout.layout import Layout
from fullshard.layout.segment import Band, StridedCopy, joined


@dataclass(frozen=True, slots=True)
class Direct:
    """A part of the shards that, gathered in rank order, is a part of the unsharded buffer.

    Attributes:
        shard_offset: offset of the part in each shard.
        numel: number of elements of the part in each shard.
        unsharded_offset: offset of the part in the unsharded buffer.
    """

    shard_offset: int
    numel: int
    unsharded_offset: int


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """The all-gathers of a bucket, which run coalesced.

        w of shape (4, 2) and b of shape (3,), 2 ranks, align=4, if w is large enough

        shard of rank 0   b0 b1 .  .  | w0 w1 w2 w3        b is gathered to a staging buffer and
        shard of rank 1   b2 .  .  .  | w4 w5 w6 w7        copied; w is gathered in place.

    Attributes:
        staged_numel: number of leading elements of each shard that are gathered to a staging
            buffer, one rank after the other; 0 if there are none.
        copies: the copies from the staging buffer to the unsharded buffer.
        direct: the other parts of the shards, which are gathered in place.
    """

    staged_numel: int
    copies: tuple[StridedCopy, ...]
    direct: tuple[Direct, ...]


def plan_gather(layout: Layout, *, min_numel: int) -> GatherPlan:
    """Plan to gather in place wherever possible, for pieces of at least ``min_numel`` elements.

    Each part that is gathered separately costs time on all ranks, so small ones are better copied.
    """
    if layout.zero_copy:
        return GatherPlan(0, (), (Direct(0, layout.shard_numel, 0),))
    staged_numel = layout.shard_numel
    direct = []
    kept = [param for param, spec in enumerate(layout.params) if spec.numel]
    for param in sorted(kept, key=lambda p: -layout.bands[p][0].segment.shard_offset):
        band = layout.bands[param][0]
        part = band.segment
        if band.num_ranks < layout.world or part.count > 1 or part.length < min_numel:
            break
        staged_numel = part.shard_offset
        direct.append(Direct(part.shard_offset, part.length, layout.unsharded_offsets[param]))
    copies = layout.copies(staged_numel, below=staged_numel) if staged_numel else ()
    return GatherPlan(staged_numel, copies, tuple(direct[::-1]))


@dataclass(frozen=True, slots=True)
class ParamGather:
    """The gather of a single parameter, by slices at the same offset in all shards.

    Attributes:
        shard_offset: offset of the slice in each shard.
        numel: number of elements of the slice; a rank that keeps fewer also sends what comes next.
        copies: the copies from the slices, one rank after the other, to the parameter; empty if
            the slices begin with the parameter.
    """

    shard_offset: int
    numel: int
    copies: tuple[StridedCopy, ...]


def plan_param_gather(layout: Layout, param: int) -> ParamGather | None:
    """Return the gather of ``param``, or None if each rank should send its interval separately.

    Intervals at different offsets or of too uneven sizes are sent separately. Slices have one size,
    so up to twice the parameter is gathered, or more if the cut is on a dim other than the first.
    """
    bands = layout.bands[param]
    kept = [band for band in bands if band.numel]
    start, numel = kept[0].segment.shard_offset, max(band.segment.numel for band in kept)
    if all(band.segment.count == 1 for band in kept):
        is_alike = all(band.segment.shard_offset == start for band in kept)
        is_wasteful = layout.world > 1 and layout.world * numel >= 2 * layout.params[param].numel
        if is_alike and not is_wasteful and all(_is_next_row(band, numel) for band in kept):
            return ParamGather(start, numel, ())
        return None
    copies = joined([band.copy(numel) for band in kept])
    return ParamGather(
        start,
        numel,
        tuple(replace(copy, staging_offset=copy.staging_offset - start) for copy in copies),
    )


def _is_next_row(band: Band, row: int) -> bool:
    """Return whether elements have the same neighbors in slices of ``row`` as in the parameter."""
    part = band.segment
    is_run = part.count == 1 and part.start == band.first_rank * row
    return is_run and (band.num_ranks == 1 or part.length == row)
