"""Lower bounds on the length of a shard, valid for every order and every placement."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from fullshard.layout.packing import Problem, common_multiple
from fullshard.layout.spec import round_up

MOST_CROWDS = 64  # with more blocks than that in one shard, crowding adds next to nothing


@dataclass(frozen=True)
class ShardSizes:
    """The shard lengths that may work: `bound`, and the longer ones that `at_least` returns.

    1. *Volume.* The shards hold all items: ``world * shard >= total``.
    2. *Crowding.* A block is in one shard. Of the ``k * world + 1`` largest blocks, some k + 1
       share a shard, so a shard is at least as long as the k + 1 smallest of these blocks
       together. With k = 0, a shard is at least as long as the largest block.
    3. *Divisibility.* Let h be the largest multiple of an item's block that is at most `shard`. An
       item with one cut has at most h units before the cut and `shard` units after. A longer item
       has two neighboring cuts. Both are a multiple of the block away from the item's start, and
       they are `shard` apart, so the block divides `shard`:

           |  ...  0 0 0 | 0 0 0 0 0 0 0 0 | 0 0 ...  |       size > h + shard
                          <--- shard ---->

       Hence `shard` is a multiple of the lcm of all blocks of items that are too long for it.

    Attributes:
        least: the shortest shard that volume and crowding allow.
        limits: shard lengths, ascending; in shards shorter than its limit, an item is too long.
        strides: ``strides[j]`` is the lcm of the blocks of items with a limit of ``limits[j]`` or
            more; an lcm above the total units is replaced by the total plus 1. There is one entry
            more than in `limits`; the last entry is 1.
    """

    least: int
    limits: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem) -> ShardSizes:
        """Return the lengths that may work for `problem`, which has at least one item."""
        blocks_of: dict[int, set[int]] = {}
        for size, block in set(zip(problem.sizes, problem.blocks, strict=True)):
            blocks_of.setdefault(_limit(size, block), set()).add(block)
        limits = sorted(blocks_of)
        strides = [1]
        for limit in reversed(limits):
            strides.append(common_multiple({strides[-1], *blocks_of[limit]}, problem.total))
        volume = round_up(problem.total, problem.world) // problem.world
        least = max(volume, _crowd(problem))
        return cls(least, tuple(limits), tuple(reversed(strides)))

    @property
    def bound(self) -> int:
        """The lower bound on the length of a shard."""
        return self.at_least(self.least)

    def at_least(self, shard: int) -> int:
        """Return the smallest length, `shard` or more, that divisibility allows."""
        while True:
            index = bisect_right(self.limits, shard)
            length = round_up(shard, self.strides[index])
            if index == len(self.limits) or length < self.limits[index]:
                return length
            shard = self.limits[index]


def _limit(size: int, block: int) -> int:
    """Return the least `shard` such that ``size <= h + shard``, with h as in `ShardSizes`.

    With ``size = 2 * a * block + rest`` and a shard of ``a * block + more`` units, more < block,
    the right side is ``2 * a * block + more``. So ``more = rest``, or a is larger by 1 and more 0.
    """
    pairs, rest = divmod(size, 2 * block)
    return pairs * block + min(rest, block)


def _crowd(problem: Problem) -> int:
    """Return the shortest shard that crowding allows."""
    num_blocks: Counter[int] = Counter()
    for (size, block), count in Counter(zip(problem.sizes, problem.blocks, strict=True)).items():
        full, rest = divmod(size, block)
        num_blocks[block] += count * full
        if rest:
            num_blocks[rest] += count
    largest = _Largest.of(num_blocks)
    most = min((largest.num - 1) // problem.world, MOST_CROWDS)
    crowds = ((k + 1, k * problem.world + 1) for k in range(most + 1))
    return max(largest.sum(among) - largest.sum(among - crowd) for crowd, among in crowds)


@dataclass(frozen=True, slots=True)
class _Largest:
    """Sums of the largest of many numbers, most of which are equal."""

    values: tuple[int, ...]  # the distinct numbers, descending
    ends: tuple[int, ...]  # per value, the count of numbers that are equal or larger
    sums: tuple[int, ...]  # per value, the sum of these numbers

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> _Largest:
        values = sorted(counts, reverse=True)
        ends = accumulate(counts[value] for value in values)
        sums = accumulate(counts[value] * value for value in values)
        return cls(tuple(values), tuple(ends), tuple(sums))

    @property
    def num(self) -> int:
        return self.ends[-1]

    def sum(self, num: int) -> int:
        """Return the sum of the `num` largest numbers."""
        index = bisect_left(self.ends, num)
        return self.sums[index] - (self.ends[index] - num) * self.values[index]
