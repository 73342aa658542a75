"""The problem that `Ragged` solves: parameters in a row of equal shards, no block of one cut.

In this module, `bound`, `orders` and `planner` all lengths count units of `align` elements. So
whatever starts at a unit is aligned, and alignment needs no further thought: a parameter of n
elements occupies the units that it begins, and it may be cut where a whole number of its blocks
ends together with a unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fullshard.layout.spec import round_up


@dataclass(frozen=True)
class Problem:
    """What is to be packed; a parameter is an *item* here, and has at least one unit.

        sizes=(3, 6), blocks=(3, 2), world=2:   item 0 in one piece, item 1 cut between its pairs

        shards of 5   0 0 0 1 1 | 1 1 1 1 .
        cuts inside            ^ 2 units from the start of item 1, a multiple of its block

    Attributes:
        sizes: per item, its length.
        blocks: per item, the distance from its start of which every cut in it must be a multiple;
            equal to the size for an item that must not be cut.
        world: the number of shards.
    """

    sizes: tuple[int, ...]
    blocks: tuple[int, ...]
    world: int

    @classmethod
    def of(cls, numels: Sequence[int], blocks: Sequence[int], *, world: int, align: int) -> Problem:
        """From numbers of elements: of each parameter, none of them empty, and of its blocks."""
        sizes = tuple(round_up(numel, align) // align for numel in numels)
        steps = (math.lcm(block, align) // align for block in blocks)
        return cls(sizes, tuple(map(min, steps, sizes)), world)

    @cached_property
    def total(self) -> int:
        """Units of all items together."""
        return sum(self.sizes)


def common_multiple(numbers: Iterable[int], most: int) -> int:
    """The least common multiple of `numbers` if it is at most `most`, else ``most + 1``."""
    multiple = 1
    for number in set(numbers):
        multiple = math.lcm(multiple, number)
        if multiple > most:
            return most + 1
    return multiple


def earliest(at: int, size: int, block: int, shard: int) -> int:
    """The first offset, at `at` or later, where an item can lie in shards of length `shard`.

        block=3, size=7, shard=10, at=5

        . . . . . ^ . 0 0 0 | 0 0 0 0 . . .          a block before the cut, and not five units

    `shard` is one of the lengths that `ShardSizes` gives, so that there is such an offset: an item
    that reaches from one shard into a third has two cuts in it, `shard` apart, and a block that
    divides `shard`.
    """
    room = shard - at % shard
    if size <= room:
        return at
    head = room - room % block
    if head and (size - head <= shard or shard % block == 0):
        return at + room - head
    cut = at + room
    if size <= shard:
        return cut
    return cut + shard % block  # as many blocks before the next cut as a shard can hold


def in_order(problem: Problem, order: Iterable[int], shard: int) -> tuple[int, ...] | None:
    """Each item's offset if they lie in this order, each as early as it can; None if too long.

    For a given order nothing is shorter: an item that starts later gives those after it no place
    that they did not have.
    """
    sizes, blocks = problem.sizes, problem.blocks
    offsets = [0] * len(sizes)
    at, room, end = 0, shard, problem.world * shard
    for item in order:
        size = sizes[item]
        if size <= room:  # the common case, without a call
            room -= size
        else:
            at = earliest(at, size, blocks[item], shard)
            room = -(at + size) % shard
        offsets[item] = at
        at += size
        if at > end:
            return None
    return tuple(offsets)
