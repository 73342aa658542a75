"""A layout for some of a layout's parameters, without room for the rest."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from fullshard.layout.layout import Layout
from fullshard.layout.segment import Band
from fullshard.layout.spec import pack, round_up

MOST_ALIGNED = 8  # elements: 16 bytes in the narrowest dtype that is reduced


def subset(layout: Layout, params: Sequence[int]) -> Layout:
    """Lay out only ``params``, ascending indices, each cut as in ``layout``.

    The result suits data of ``params`` alone, such as the gradients of the trainable parameters.
    Every rank keeps their order, and the distance between two of them with no other parameter in
    between. The room of the other parameters is removed as far as that shortens all shards.

        a, b and c on 2 ranks                 only a and c

        rank 0   a0 a1 b0 b1 b2 b3 b4         rank 0   a0 a1 .  .
        rank 1   b5 b6 b7 c0 c1 c2 c3         rank 1   c0 c1 c2 c3

    Each parameter stays on the ranks that had it before. So shards are as long as the most that a
    single rank keeps, up to alignment.
    """
    number_of = {param: number for number, param in enumerate(params)}
    filled = [band for bands in layout.bands for band in bands if band.numel]
    unit = gcd(MOST_ALIGNED, layout.shard_numel, *(b.segment.shard_offset for b in filled))
    offsets, shard_numel = _closed_up(filled, set(number_of), unit)
    specs = [layout.params[param] for param in params]
    unsharded_offsets, unsharded_numel = pack([spec.numel for spec in specs], 1)

    def moved(band: Band) -> Band:
        offset = offsets.get((band.segment.param, band.first_rank), 0)
        number = number_of[band.segment.param]
        return replace(band, segment=replace(band.segment, param=number, shard_offset=offset))

    return Layout(
        params=tuple(specs),
        world=layout.world,
        shard_numel=shard_numel,
        unsharded_numel=unsharded_numel,
        unsharded_offsets=unsharded_offsets,
        bands=tuple(tuple(map(moved, layout.bands[param])) for param in params),
    )


def _closed_up(
    filled: Sequence[Band], kept: set[int], unit: int
) -> tuple[dict[tuple[int, int], int], int]:
    """Return the new shard offsets, by parameter and first rank, and the new shard length.

    Ranks between two successive borders of bands are alike, so one rank of each range is enough.
    """
    borders = sorted({rank for band in filled for rank in (band.first_rank, band.end_rank)})
    ends = [0] * len(borders)  # of the parameters kept so far, in the new shard
    old_ends: list[int | None] = [None] * len(borders)  # old end of the parameter just kept, if any
    offsets = {}
    for band in sorted(filled, key=lambda band: (band.segment.shard_offset, band.first_rank)):
        part = band.segment
        alike = range(bisect_left(borders, band.first_rank), bisect_left(borders, band.end_rank))
        if part.param not in kept:
            for at in alike:
                old_ends[at] = None
            continue
        start = 0
        for at in alike:
            last = old_ends[at]
            gap = 0 if last is None else part.shard_offset - last
            start = max(start, ends[at] + gap)
        start = round_up(start, unit)
        offsets[part.param, band.first_rank] = start
        for at in alike:
            ends[at], old_ends[at] = start + part.numel, part.shard_offset + part.numel
    return offsets, round_up(max(ends, default=0), unit)
