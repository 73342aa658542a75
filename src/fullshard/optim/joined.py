"""The same elements in fewer tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import add, attrgetter, ne

from torch import Tensor

from fullshard.tensors import flat_part_of

__all__ = ["joined"]


def joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """All elements of ``tensors``; those that follow each other in a buffer as one 1-D view.

    Without padding between them, that is. Tensors without elements are left out.
    """
    filled = list(filter(Tensor.numel, tensors))
    try:
        starts = list(map(Tensor.data_ptr, filled))
        if not all(map(Tensor.is_contiguous, filled)):
            return filled
    except RuntimeError:  # sparse
        return filled
    ends = list(map(add, starts, map(attrgetter("nbytes"), filled)))
    cuts = [at for at, is_cut in enumerate(map(ne, ends, starts[1:]), 1) if is_cut]
    found: list[Tensor] = []
    for a, b in pairwise((0, *cuts, len(filled)) if filled else ()):
        place = flat_part_of(filled[a]) if b > a + 1 else None
        numel = (ends[b - 1] - starts[a]) // filled[a].itemsize
        if place is not None and place.start + numel <= place.flat.numel():
            found.append(place.flat.narrow(0, place.start, numel))
        else:
            found += filled[a:b]
    return found
