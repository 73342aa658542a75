"""The same elements in fewer tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from operator import add, attrgetter, itemgetter, ne

from torch import Tensor

from fullshard.tensors import flat_part_of


def joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """All elements of ``tensors``; those that follow each other in a buffer as one 1-D view.

    Without padding between them, that is. Tensors without elements are left out. The order is that
    of the first tensor in each view: it depends on what is in which buffer, never on where buffers
    happen to be, or sums over the views would.
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
    """Neighbours in memory, from ``first`` up to ``last`` or the end of the buffer, as one."""
    place = flat_part_of(tensors[first]) if last > first + 1 else None
    if place is None:
        return first + 1, tensors[first]
    stop = bisect_left(starts, place.flat.data_ptr() + place.flat.nbytes, first, last)
    numel = sum(map(Tensor.numel, tensors[first:stop]))
    return stop, place.flat.narrow(0, place.start, numel)
