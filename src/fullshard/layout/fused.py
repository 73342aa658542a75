"""The parts of a layout that a device copies in one kernel: slots of equal chunks, and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from fullshard.layout.layout import Layout
from fullshard.layout.segment import StridedCopy

MOST_PADDING = 16  # elements of padding per parameter, on average


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a parameter whose chunks, one per rank, are at the same offset in all shards.

    The parameter, seen as rows of ``unit`` elements, is cut as by ``torch.chunk`` into chunks of
    ``chunk / unit`` rows; the last chunk may be shorter, and later ranks keep nothing.

    Attributes:
        param: index in `Layout.params`.
        offset: offset in each shard.
        chunk: number of elements of a full chunk.
        unit: number of elements of a row.
    """

    param: int
    offset: int
    chunk: int
    unit: int


def plan_slots(layout: Layout) -> tuple[Slot, ...] | None:
    """Return the slots of all non-empty parameters, in the order of the shards.

    Return None if a parameter is cut in another way, or if there is more padding than alignment
    causes: filling all slots in one kernel fills the padding as well.
    """
    slots = []
    for param, (spec, bands) in enumerate(zip(layout.params, layout.bands, strict=True)):
        if not spec.numel:
            continue
        kept = [band for band in bands if band.numel]
        first = kept[0].segment
        unit = gcd(spec.numel, first.length)
        # Rows per chunk as in ``torch.chunk``: an equal share, rounded up.
        rows = -(-spec.numel // (unit * layout.world))
        are_alike = all(
            band.segment.count == 1 and band.segment.shard_offset == first.shard_offset
            for band in kept
        )
        if kept[0].first_rank or not are_alike or rows * unit != first.length:
            return None
        slots.append(Slot(param, first.shard_offset, first.length, unit))
    padding = layout.shard_numel - sum(slot.chunk for slot in slots)
    if not slots or padding > MOST_PADDING * len(slots):
        return None
    return tuple(sorted(slots, key=lambda slot: slot.offset))


def even_from(layout: Layout, stop: int) -> int:
    """Return the offset in each shard from which, up to `stop`, pieces are even and undivided.

    All ranks keep equal pieces of the parameters there, and each piece is one run. `PerParameter`
    lays out all other parameters first. Return `stop` if there are no such parameters.
    """
    kept = [bands for bands in layout.bands if any(band.numel for band in bands)]
    uneven = [
        part.shard_offset + part.numel
        for bands in kept
        for part in (band.segment for band in bands)
        if part.shard_offset < stop and (bands[0].num_ranks < layout.world or part.count > 1)
    ]
    end = max(uneven, default=0)
    starts = (bands[0].segment.shard_offset for bands in kept)
    return min((start for start in starts if end <= start < stop), default=stop)


def in_rows(copies: Sequence[StridedCopy], *, most: int) -> list[StridedCopy]:
    """Return the same copies, with boxes of few rows split into one copy per row.

    A copy of one row is dense on both sides. At most ``most`` of the returned copies are dense,
    unless more were dense before.
    """
    left = most - sum(len(copy.sizes) == 1 for copy in copies)
    cut = set()
    for number in sorted(range(len(copies)), key=lambda number: copies[number].sizes[0]):
        rows = copies[number].sizes[0]
        if len(copies[number].sizes) == 2 and rows <= left:
            cut.add(number)
            left -= rows
    return [
        row
        for number, copy in enumerate(copies)
        for row in (_rows(copy) if number in cut else (copy,))
    ]


def _rows(copy: StridedCopy) -> list[StridedCopy]:
    return [
        replace(
            copy,
            sizes=copy.sizes[1:],
            param_offset=copy.param_offset + row * copy.param_strides[0],
            param_strides=copy.param_strides[1:],
            staging_offset=copy.staging_offset + row * copy.staging_strides[0],
            staging_strides=copy.staging_strides[1:],
        )
        for row in range(copy.sizes[0])
    ]
