"""Merging of neighboring tensors into fewer tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from operator import add, attrgetter, itemgetter, ne

from torch import Tensor

from fullshard.tensors import flat_part_of


def joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return ``tensors`` with neighbors in a buffer merged into one 1-D view each.

    Neighbors have no padding between them. Tensors without elements are left out. Views are sorted
    by the first index of their tensors, so the order depends on which buffer holds what, never on
    addresses; otherwise the rounding of sums over the views would depend on addresses too.
    """
    filled = list(filter(Tensor.numel, tensors))
    try:
        addresses = list(map(Tensor.data_ptr, filled))
        if not all(map(Tensor.is_contiguous, filled)) or len({t.device for t in filled}) > 1:
            return filled
    except RuntimeError:  # sparse
        return filled
    order = sorted(range(len(filled)), key=addresses.__getitem__)
    by_address = [filled[number] for number in order]
    starts = [addresses[number] for number in order]
    ends = list(map(add, starts, map(attrgetter("nbytes"), by_address)))
    cuts = [at for at, is_cut in enumerate(map(ne, ends, starts[1:]), 1) if is_cut]
    found: list[tuple[int, Tensor]] = []
    for first, last in pairwise((0, *cuts, len(filled)) if filled else ()):
        while first < last:
            stop, view = _view(by_address, starts, first, last)
            found.append((min(order[first:stop]), view))
            first = stop
    return [view for _, view in sorted(found, key=itemgetter(0))]


def _view(
    tensors: Sequence[Tensor], starts: list[int], first: int, last: int
) -> tuple[int, Tensor]:
    """Merge neighbors from ``first`` up to ``last`` or the buffer's end; also return the stop."""
    place = flat_part_of(tensors[first]) if last > first + 1 else None
    if place is None:
        return first + 1, tensors[first]
    stop = bisect_left(starts, place.flat.data_ptr() + place.flat.nbytes, first, last)
    numel = sum(map(Tensor.numel, tensors[first:stop]))
    return stop, place.flat.narrow(0, place.start, numel)
