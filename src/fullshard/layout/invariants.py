"""Invariants of every layout, proved in time that does not grow with the number of ranks.

Together the three checks prove that each element of each parameter has exactly one place in the
shards and one place in the unsharded buffer. They cost O(n log n) for n bands, so they run on
every layout that is built.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

from fullshard.errors import LayoutError
from fullshard.layout.segment import Band
from fullshard.layout.spec import ParamSpec


def check_param(index: int, spec: ParamSpec, bands: Sequence[Band], *, world: int) -> None:
    """Check that each rank is in one band and each element of the parameter in one segment.

    All segments of a parameter repeat with the same `step`, `count` times. So it is enough that
    ``count * step`` is the numel, and that the first stretches of all ranks, in rank order, tile
    ``[0, step)``.

        rank 0   rank 1   rank 2 | rank 0   rank 1   rank 2 |
        |---------- step --------|---------- step --------|

    Raises:
        LayoutError: if a rank or an element is missing or appears twice.
    """
    rank = start = 0
    for band in bands:
        part = band.segment
        if band.first_rank != rank or band.num_ranks < 1:
            raise _broken(spec, f"a band of ranks {band.first_rank} to {band.end_rank - 1}", rank)
        if part.param != index or part.length < 0 or part.start != start:
            raise _broken(spec, part, f"param {index} with start {start}")
        if (part.count, part.step) != (bands[0].segment.count, bands[0].segment.step):
            raise _broken(spec, part, "the count and step that rank 0 has")
        if math.prod(band.local_shape) != part.numel:
            raise _broken(spec, f"local shape {band.local_shape}", f"{part.numel} elements")
        rank = band.end_rank
        start += band.num_ranks * part.length
    if rank != world:
        raise _broken(spec, f"bands for {rank} ranks", world)
    part = bands[0].segment
    if start != part.step or part.count * part.step != spec.numel:
        covered = f"{start} of each {part.step} elements, {part.count} times"
        raise _broken(spec, covered, f"all {spec.numel} elements once")


def check_shards(
    params: Sequence[ParamSpec], bands: Iterable[Sequence[Band]], shard_numel: int
) -> None:
    """Check that no segment exceeds the shard and that no two on the same rank overlap.

    A band is a rectangle of ranks times shard elements. The sweep visits the ranks where a
    rectangle begins or ends and keeps the open intervals sorted; a new interval is compared only
    with its two neighbors.

    Raises:
        LayoutError: if a parameter exceeds the shard or two overlap; the message names them.
    """
    begins, ends = 1, 0  # at the same rank, ends sort first and make room
    events = []
    for band in (band for of_param in bands for band in of_param if band.numel):
        part = band.segment
        interval = (part.shard_offset, part.shard_offset + part.numel, part.param)
        if interval[0] < 0 or interval[1] > shard_numel:
            raise _broken(params[part.param], part, f"to lie in {shard_numel} elements")
        events.append((band.first_rank, begins, interval))
        events.append((band.end_rank, ends, interval))
    open_intervals: list[tuple[int, int, int]] = []
    for _, kind, interval in sorted(events):
        at = bisect_left(open_intervals, interval)
        if kind == ends:
            del open_intervals[at]
            continue
        for begin, end, other in open_intervals[max(at - 1, 0) : at + 1]:
            if begin < interval[1] and interval[0] < end:
                raise _overlap(
                    "a shard", params[other], params[interval[2]], (begin, end), interval
                )
        open_intervals.insert(at, interval)


def check_unsharded(
    params: Sequence[ParamSpec], offsets: Sequence[int], unsharded_numel: int
) -> None:
    """Check that no parameter exceeds the unsharded buffer and that no two overlap.

    Raises:
        LayoutError: if a parameter exceeds the buffer or two overlap; the message names them.
    """
    regions = sorted(
        (offset, offset + spec.numel, index)
        for index, (spec, offset) in enumerate(zip(params, offsets, strict=True))
        if spec.numel
    )
    for begin, end, index in regions:
        if begin < 0 or end > unsharded_numel:
            got = f"unsharded elements {begin} to {end}"
            raise _broken(params[index], got, f"to lie in {unsharded_numel}")
    for before, after in pairwise(regions):
        if before[1] > after[0]:
            raise _overlap(
                "the unsharded buffer", params[before[2]], params[after[2]], before, after
            )


def _broken(spec: ParamSpec, got: object, expected: object) -> LayoutError:
    return LayoutError(
        f"parameter {spec.name!r} of shape {spec.shape}: got {got}, expected {expected}"
    )


def _overlap(
    where: str,
    first: ParamSpec,
    second: ParamSpec,
    first_at: tuple[int, ...],
    second_at: tuple[int, ...],
) -> LayoutError:
    return LayoutError(
        f"parameters {first.name!r} and {second.name!r} overlap in {where}: got elements "
        f"{first_at[0]} to {first_at[1]} and {second_at[0]} to {second_at[1]}, "
        "expected no element in common"
    )
