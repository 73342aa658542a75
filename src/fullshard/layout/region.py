"""Regions: the elements of a tensor that a rank holds, and the overlaps of two such regions.

Rank 1 of a (3, 8) tensor, cut on dim 1, and of that part the second half of the elements:

    . . . . . . . .
    . . . . . . a b       Region(dims=(((0, 3),), ((4, 4),)), start=6, stop=12)
    . . . . c d e f

Its elements lie end to end in the rank's local tensor: a b c d e f.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul
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


class Interval(NamedTuple):
    """Indices, or elements in row-major order, ``start`` to ``start + length``."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        """One past the last."""
        return self.start + self.length


Intervals = tuple[Interval, ...]
"""Ascending intervals of one dim, at least one; only a single one may be empty."""


class Overlap(NamedTuple):
    """A box of elements that two regions have in common, as a strided copy between them.

    Element ``(i, j, ...)`` of the box is element ``offset + i*strides[0] + j*strides[1] + ...`` of
    a region.
    """

    sizes: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    other_offset: int
    other_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def is_flat(self) -> bool:
        """Return whether the elements follow each other in both regions."""
        flat = _strides(self.sizes)
        pairs = zip(self.sizes, flat, self.strides, self.other_strides, strict=True)
        return all(size == 1 or own == mine == its for size, own, mine, its in pairs)

    @property
    def stop(self) -> int:
        """One past the last element, in the first region."""
        return self.offset + _dot(self.strides, [size - 1 for size in self.sizes]) + 1


@dataclass(frozen=True, slots=True)
class Region:
    """Elements ``start`` to ``stop``, in row-major order, of a grid of rows, columns and so on.

    Attributes:
        dims: for each dim of the tensor the indices that are in the grid.
        start: the first element of the grid that belongs to the region.
        stop: one past the last.
    """

    dims: tuple[Intervals, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def grid(self) -> tuple[int, ...]:
        """Sizes of the grid."""
        return tuple(sum(one.length for one in intervals) for intervals in self.dims)

    def part(self, start: int, stop: int) -> Region:
        """Return elements ``start`` to ``stop`` of this region."""
        return Region(self.dims, self.start + start, self.start + stop)

    def interval_in(self, shape: Sequence[int]) -> Interval | None:
        """Return the region as an interval of a tensor of ``shape``; None if it has gaps."""
        inner = math.prod(shape[1:])
        if self.dims[1:] != full_region(shape).dims[1:] or (shape and len(self.dims[0]) > 1):
            return None
        before = self.dims[0][0].start * inner if shape else 0
        return Interval(before + self.start, self.numel)

    def boxes(self) -> Iterator[tuple[Interval, ...]]:
        """Yield boxes of the tensor, one interval for each dim, that together cover the region."""
        for brick in self._bricks():
            yield tuple(
                Interval(runs[0].full, runs[-1].full + runs[-1].length - runs[0].full)
                for runs in brick.runs
            )

    def stretches(self, other: Region) -> Iterator[Overlap]:
        """Yield the same as ``overlaps``, but a single stretch if both have the same dims."""
        if self.dims != other.dims:
            yield from self.overlaps(other)
            return
        begin, stop = max(self.start, other.start), min(self.stop, other.stop)
        if begin < stop:
            offset, other_offset = begin - self.start, begin - other.start
            yield Overlap((stop - begin,), offset, (1,), other_offset, (1,))

    def overlaps(self, other: Region) -> Iterator[Overlap]:
        """Yield the overlaps with another region of the same tensor, each element once.

        Each overlap has the dims of the tensor.
        """
        for brick, its in itertools.product(self._bricks(), other._bricks()):
            runs = [_common(a, b) for a, b in zip(brick.runs, its.runs, strict=True)]
            for run in itertools.product(*runs):
                yield Overlap(
                    sizes=tuple(one.length for one in run),
                    offset=brick.offset + _dot(brick.strides, [one.own for one in run]),
                    strides=brick.strides,
                    other_offset=its.offset + _dot(its.strides, [one.other for one in run]),
                    other_strides=its.strides,
                )

    def _bricks(self) -> Iterator[_Brick]:
        offset = 0
        for box in boxes(self.grid, self.start, self.numel):
            runs = map(_runs, self.dims, box.offsets, box.sizes)
            yield _Brick(offset, _strides(box.sizes), tuple(runs))
            offset += box.numel


def full_region(shape: Sequence[int]) -> Region:
    """Return the region of all elements of a tensor."""
    return Region(tuple((Interval(0, size),) for size in shape), 0, math.prod(shape))


def cut(intervals: Intervals, start: int, length: int) -> Intervals:
    """Return the indices at positions ``start`` to ``start + length`` of ``intervals``."""
    found = [Interval(first, length) for _, first, length in _runs(intervals, start, length)]
    return tuple(found) or (Interval(intervals[0].start, 0),)


class _Run(NamedTuple):
    """Neighboring indices of one dim, in a box and in the tensor."""

    own: int
    full: int
    length: int


class _Brick(NamedTuple):
    """A box of the grid, end to end in the region."""

    offset: int
    strides: tuple[int, ...]
    runs: tuple[list[_Run], ...]


class _CommonRun(NamedTuple):
    own: int
    other: int
    length: int


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = itertools.accumulate((*sizes[:0:-1],), mul, initial=1)
    return tuple(strides)[::-1] if sizes else ()


def _dot(strides: Sequence[int], index: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(strides, index, strict=True))


def _runs(intervals: Intervals, start: int, length: int) -> list[_Run]:
    """Return the runs of the indices at positions ``start`` to ``start + length``."""
    found, passed = [], 0
    for interval in intervals:
        first = max(start, passed)
        stop = min(start + length, passed + interval.length)
        if first < stop:
            found.append(_Run(first - start, interval.start + first - passed, stop - first))
        passed += interval.length
    return found


def _common(ours: list[_Run], theirs: list[_Run]) -> list[_CommonRun]:
    found = []
    for a, b in itertools.product(ours, theirs):
        first = max(a.full, b.full)
        stop = min(a.full + a.length, b.full + b.length)
        if first < stop:
            found.append(_CommonRun(a.own + first - a.full, b.own + first - b.full, stop - first))
    return found
