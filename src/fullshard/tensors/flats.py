"""Find out which tensors are parts of one flat buffer, and thus neighbors in memory.

Users hold the tensors of a bucket as separate tensors, each with a separate storage object. Code
that treats them as one tensor, such as an optimizer, asks this module. A flat buffer is announced
when it is made, and its parts are known by their storages.

    flat     | w w w w w w | . . | b b b |         parts (0, 6) and (8, 3); neighbors
    part     |      0      |     |   1   |         are parts with consecutive numbers
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from fullshard._torch import memory as _memory


@dataclass(frozen=True, slots=True, eq=False)
class FlatPart:
    """The position of a tensor in a flat buffer.

    Attributes:
        flat: the 1-D buffer. Between neighbors there is only padding, which belongs to no part.
        number: index of the part among the parts that are not empty, in the order of memory.
        start: index in ``flat`` of the first element.
        stop: one past the last element.
    """

    flat: Tensor
    number: int
    start: int
    stop: int


def announce_flat(flat: Tensor, parts: Iterable[tuple[int, int]]) -> None:
    """Announce that tensors in the memory of ``flat`` are parts, for ``flat_part_of`` to find.

    Args:
        flat: the 1-D buffer, the only one in its storage; it is not kept alive.
        parts: first element and number of elements of each part; empty parts are ignored.
    """
    filled = sorted((start, length) for start, length in parts if length)
    numbered = {start: (number, length) for number, (start, length) in enumerate(filled)}
    _memory.announce(flat, numbered)


def flat_part_of(tensor: Tensor) -> FlatPart | None:
    """Return the part that the contiguous ``tensor`` covers completely; None if there is none.

    ``tensor`` is a view of the buffer, or was made by ``_memory.own_part``.
    """
    flat, start, (number, length) = _memory.announced_part(tensor)
    if flat is None or flat.dtype != tensor.dtype or not 0 < length == tensor.numel():
        return None
    return FlatPart(flat, number, start, start + length) if tensor.is_contiguous() else None
