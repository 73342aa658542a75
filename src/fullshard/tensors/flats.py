"""Find out which tensors are parts of one flat buffer, and thus neighbors in memory.

Users hold the tensors of a bucket as separate tensors, each with a separate storage object. Code
that treats them as one tensor, such as an optimizer, asks this module. A part knows its position
from the moment when the buffer is cut.

    flat     | w w w w w w | . . | b b b |         parts (0, 6) and (8, 3); neighbors
    part     |      0      |     |   1   |         are parts with consecutive numbers
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullshard._torch import memory as _memory


class FlatPart(NamedTuple):
    """The position of a tensor in a flat buffer.

    Attributes:
        flat: the 1-D buffer. Between neighbors there is only padding, which belongs to no part.
        number: index of the part among the parts that are not empty, in the order of memory.
        start: index in ``flat`` of the first element.
    """

    flat: Tensor
    number: int
    start: int


def cut_flat(flat: Tensor, places: Iterable[tuple[int, Sequence[int]]]) -> list[Tensor]:
    """Return parts of ``flat``, each with a storage of its own that keeps ``flat`` alive.

    Args:
        flat: the 1-D buffer.
        places: first element and shape of each part.
    """
    places = list(places)
    filled = sorted(start for start, shape in places if 0 not in shape)
    number_of = {start: number for number, start in enumerate(filled)}
    return [
        _memory.own_part(flat, start, shape, number=None if 0 in shape else number_of[start])
        for start, shape in places
    ]


def flat_part_of(tensor: Tensor) -> FlatPart | None:
    """Return the part that ``tensor`` covers completely; None if there is none."""
    storage: Any = tensor.untyped_storage() if tensor.layout is torch.strided else None
    number = getattr(storage, "number", None)
    if number is None or storage.nbytes() != tensor.nbytes or not tensor.is_contiguous():
        return None
    flat = storage.kept_alive
    return FlatPart(flat, number, storage.start) if flat.dtype == tensor.dtype else None


def flat_starts(tensors: Sequence[Tensor]) -> tuple[list[Tensor | None], list[int]]:
    """Return the flat buffers of tensors, or None, and their starts there, or -1; a pass in C.

    Raises:
        RuntimeError: a tensor has no storage, such as a sparse one.
    """
    storages = list(map(Tensor.untyped_storage, tensors))
    flats = map(getattr, storages, repeat("kept_alive"), repeat(None))
    return list(flats), list(map(getattr, storages, repeat("start"), repeat(-1)))
