"""The placement ``RaggedShard``, with which each rank holds an interval of a tensor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch.distributed.tensor import Placement

from fullshard.layout.region import Interval


class _Alike(NamedTuple):
    """A series of neighboring ranks whose intervals have equal lengths."""

    first_rank: int
    start: int
    length: int


class RaggedShard(Placement):
    """A placement that gives each rank an interval of the flattened tensor, perhaps an empty one.

    Intervals follow each other in the order of ranks along the mesh dim. If later mesh dims cut the
    tensor too, for tensor parallelism, the intervals are those of the part that remains for this
    rank, and ranks along those dims may have different intervals. Equal lengths of neighboring
    ranks are stored once, with a count, so the value is small for any number of ranks, and equal
    cuts compare equal.
    """

    def __init__(self, lengths: Iterable[tuple[int, int]]) -> None:
        """Create from pairs of a number of ranks and the length that each of these ranks holds."""
        super().__init__()
        self._lengths: list[tuple[int, int]] = []
        for num_ranks, length in lengths:
            if self._lengths and self._lengths[-1][1] == length:
                num_ranks += self._lengths.pop()[0]
            if num_ranks:
                self._lengths.append((num_ranks, length))
        self._alike: list[_Alike] = []
        rank = start = 0
        for num_ranks, length in self._lengths:
            self._alike.append(_Alike(rank, start, length))
            rank += num_ranks
            start += num_ranks * length
        self._numel = start
        self._hash = hash(tuple(self._lengths))

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Pairs of a number of ranks and the length that each of these ranks holds."""
        return list(self._lengths)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the tensor."""
        return sum(num_ranks for num_ranks, _ in self._lengths)

    @property
    def numel(self) -> int:
        """Number of elements in all intervals together."""
        return self._numel

    def interval(self, rank: int) -> Interval:
        """Return the interval that ``rank`` holds."""
        alike = self._alike[bisect_right(self._alike, rank, key=lambda a: a.first_rank) - 1]
        return Interval(alike.start + (rank - alike.first_rank) * alike.length, alike.length)

    def ranks_in(self, start: int, stop: int) -> Iterator[int]:
        """Yield the ranks that hold any of the elements ``start`` to ``stop``."""
        first = max(bisect_right(self._alike, start, key=lambda a: a.start) - 1, 0)
        for at in range(first, len(self._alike)):
            alike, count = self._alike[at], self._lengths[at][0]
            if alike.start >= stop:
                return
            if alike.length:
                begin = max(start - alike.start, 0) // alike.length
                end = min(-(-(stop - alike.start) // alike.length), count)
                yield from range(alike.first_rank + begin, alike.first_rank + end)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and self._lengths == other._lengths

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        parts = (f"{n} x{ranks}" if ranks > 1 else str(n) for ranks, n in self._lengths)
        return f"RaggedShard({', '.join(parts)})"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return RaggedShard, (list(self._lengths),)

    def __deepcopy__(self, memo: dict[int, object]) -> RaggedShard:
        return self
