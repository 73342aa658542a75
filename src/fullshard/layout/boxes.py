"""Boxes that make up an interval of a flattened parameter, for checkpoints, which store boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular part of a tensor that is contiguous in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, length: int) -> tuple[Box, ...]:
    """Return the elements ``start`` to ``start + length``, in row-major order, as boxes.

    The boxes are in the order of their elements and as few as possible: at most ``2 n - 1`` for n
    dims, none for no elements.

    >>> [box.sizes for box in boxes((4, 5), 3, 14)]
    [(1, 2), (2, 5), (1, 2)]

        . . . a a
        b b b b b       a, b and c
        b b b b b
        c c . . .
    """
    return tuple(_boxes(tuple(shape), start, start + length)) if length else ()


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if not shape:
        yield Box((), ())
        return
    inner_shape = shape[1:]
    inner = math.prod(inner_shape)
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:  # within one row
        yield from _in_row(first, inner_shape, head, tail)
        return
    if head:
        yield from _in_row(first, inner_shape, head, inner)
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in inner_shape)), (last - first, *inner_shape))
    if tail:
        yield from _in_row(last, inner_shape, 0, tail)


def _in_row(row: int, inner_shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    for box in _boxes(inner_shape, start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))
