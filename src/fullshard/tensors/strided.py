"""What DTensor makes of a strided cut, in numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

__all__ = ["cut_sizes", "reads_alike"]


@cache
def reads_alike(size: int, dp_size: int, tp_sizes: tuple[int, ...]) -> bool:
    """Whether DTensor's reading of a strided cut gives each rank the elements that it has.

    Ours: a tensor dim of ``size`` elements is cut by mesh dims of ``tp_sizes`` one after the
    other, then each piece over ``dp_size`` ranks, always as ``torch.chunk`` does. DTensor reads
    ``_StridedShard``: it cuts into as many pieces as ``tp_sizes`` have ranks at once, cuts each
    over ``dp_size``, and cuts what one data-parallel rank then has by ``tp_sizes`` again. Where
    everything divides, that is the same, also for one tensor-parallel dim over two data-parallel
    ranks. It is not for 7 over dp 3, tp 2, for 50257 over dp 4, tp 2, or for 5 over dp 2, tp 2 x 2.

    There ``full_tensor()`` of torch 2.13 is right: it undoes cuts in the order in which they were
    made. But ``distribute_tensor`` onto such placements fails, and the local shapes and offsets
    that torch computes, which distributed checkpoints store, are not those of the data.
    """
    num_pieces = math.prod(tp_sizes)
    if size % (num_pieces * dp_size) == 0:
        return True
    whole = _Interval(0, size)
    pieces = [whole.chunk(num_pieces, i) for i in range(num_pieces)]
    for rank in range(dp_size):
        row = [piece.chunk(dp_size, rank) for piece in pieces]
        length = sum(part.length for part in row)
        for place in product(*map(range, tp_sizes)):
            ours = whole.nested(tp_sizes, place).chunk(dp_size, rank)
            read = _Interval(0, length).nested(tp_sizes, place)
            if list(_within(row, read)) != ([ours] if ours.length else []):
                return False
    return True


def cut_sizes(size: int, cuts: Iterable[int]) -> set[int]:
    """The sizes of the pieces of ``size`` elements after cuts into so many pieces each."""
    sizes = {size}
    for num in cuts:
        sizes = {_Interval(0, one).chunk(num, i).length for one in sizes for i in range(num)}
    return sizes


class _Interval(NamedTuple):
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def chunk(self, num: int, index: int) -> _Interval:
        """Piece ``index`` of ``num``, as ``torch.chunk`` cuts."""
        step = -(-self.length // num)
        start = min(self.start + index * step, self.stop)
        return _Interval(start, min(start + step, self.stop))

    def nested(self, nums: Iterable[int], indices: Iterable[int]) -> _Interval:
        """The piece of a piece of ..."""
        piece = self
        for num, index in zip(nums, indices, strict=True):
            piece = piece.chunk(num, index)
        return piece


def _within(row: Iterable[_Interval], part: _Interval) -> Iterator[_Interval]:
    """What ``part``, counted in the elements of ``row``, holds: intervals, neighbours joined."""
    last: _Interval | None = None
    offset = 0
    for run in row:
        start = run.start + max(part.start - offset, 0)
        stop = min(run.stop, run.start + part.stop - offset)
        offset += run.length
        if start >= stop:
            continue
        if last is not None and last.stop == start:
            last = _Interval(last.start, stop)
            continue
        if last is not None:
            yield last
        last = _Interval(start, stop)
    if last is not None:
        yield last
