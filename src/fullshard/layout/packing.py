"""The packing problem of `Ragged`: parameters in a row of equal shards, with no block cut.

In this module and in `bound`, `orders` and `planner`, all lengths count units of `align` elements.
So everything that starts at a unit is aligned. The numel of a parameter is rounded up to units. A
parameter may be cut wherever the end of one of its blocks is also the end of a unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fullshard.layout.spec import round_up


@dataclass(frozen=True)
class Problem:
    """A packing problem; its *items* are the parameters, each with at least one unit.

        sizes=(3, 6), blocks=(3, 2), world=2:   item 0 uncut, item 1 cut between its pairs

        shards of 5   0 0 0 1 1 | 1 1 1 1 .
        cuts inside            ^ 2 units from the start of item 1, a multiple of its block

    Attributes:
        sizes: the length of each item.
        blocks: the block of each item. Every cut in an item must be a multiple of its block away
            from its start. An item that must not be cut has a block of its own size.
        world: the number of shards.
    """

    sizes: tuple[int, ...]
    blocks: tuple[int, ...]
    world: int

    @classmethod
    def of(cls, numels: Sequence[int], blocks: Sequence[int], *, world: int, align: int) -> Problem:
        """Return the problem of non-empty parameters, given each one's numel and block numel."""
        sizes = tuple(round_up(numel, align) // align for numel in numels)
        steps = (math.lcm(block, align) // align for block in blocks)
        return cls(sizes, tuple(map(min, steps, sizes)), world)

    @cached_property
    def total(self) -> int:
        """Number of units of all items together."""
        return sum(self.sizes)


def common_multiple(numbers: Iterable[int], most: int) -> int:
    """Return the least common multiple of `numbers`, or ``most + 1`` if it is more than `most`."""
    return min(math.lcm(*numbers), most + 1)


def earliest(at: int, size: int, block: int, shard: int) -> int:
    """Return the first offset, `at` or later, where an item fits in shards of length `shard`.

        block=3, size=7, shard=10, at=5

        . . . . . ^ . 0 0 0 | 0 0 0 0 . . .          one block before the cut, not five units

    `shard` must be a length that `ShardSizes` returns, so that such an offset exists. An item that
    reaches from one shard into a third has two cuts, `shard` apart, so its block divides `shard`.
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
    """Return the items' offsets in this order, each as early as possible; None if too long.

    No other placement in this order is shorter: starting an item later opens no new place for the
    items after it.
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
