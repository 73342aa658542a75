"""Orders in which the items fit into shards of a given length.

For a given order there is nothing to decide: each item lies as early as it can (`in_order`). So all
that is left is to find the order, by `any_order`, which is exact and for few kinds of items, or by
`coarse_first`, which is greedy.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fullshard.layout.packing import Problem, earliest

Kind = tuple[int, int]  # size and block; items of a kind are placed in the order of their indices

MOST_ITEMS = 64  # for `any_order`, which is a recursion
MOST_REMAINDERS = 4096  # the same, and ways to have placed some items of each kind
MOST_GROUPS = 64  # different blocks, for `coarse_first`


@dataclass(slots=True)
class Budget:
    """How many more items may be tried; counted and not timed, so that all ranks agree."""

    left: int


def has_few_orders(problem: Problem) -> bool:
    """Whether `any_order` can see them all: always for 12 items, for more if they are alike."""
    if len(problem.sizes) > MOST_ITEMS:
        return False
    return math.prod(len(items) + 1 for items in _by_kind(problem).values()) <= MOST_REMAINDERS


def any_order(problem: Problem, shard: int, budget: Budget) -> tuple[int, ...] | None:
    """The items' offsets in the first order that fits; None if there is none.

    First as in a dictionary, so that the items are in the order of their indices for as long as
    the rest still fits. It goes through the orders in depth and remembers, for what remained to
    be placed, the least offset from which that did not fit. When nothing is left of `budget` it
    gives up.
    """
    search = _AnyOrder(
        shard=shard,
        end=problem.world * shard,
        items={kind: items[::-1] for kind, items in _by_kind(problem).items()},
        budget=budget,
    )
    if not search.place(0, problem.total):
        return None
    return tuple(search.offsets[item] for item in range(len(problem.sizes)))


@dataclass(slots=True)
class _AnyOrder:
    shard: int
    end: int
    items: dict[Kind, list[int]]  # not placed yet, the next one last
    budget: Budget
    offsets: dict[int, int] = field(default_factory=dict)
    too_late: dict[tuple[int, ...], int] = field(default_factory=dict)

    def place(self, at: int, volume: int) -> bool:
        """Place all remaining items, `volume` units, at `at` or later."""
        if not volume:
            return True
        for kind in sorted(
            filter(self.items.get, self.items), key=lambda kind: self.items[kind][-1]
        ):
            if self.budget.left <= 0:
                return False
            self.budget.left -= 1
            size, block = kind
            offset = earliest(at, size, block, self.shard)
            if offset + volume > self.end:
                continue
            item = self.items[kind].pop()
            rest = tuple(map(len, self.items.values()))
            if offset + size < self.too_late.get(rest, self.end + 1):
                if self.place(offset + size, volume - size):
                    self.offsets[item] = offset
                    return True
                self.too_late[rest] = offset + size
            self.items[kind].append(item)
        return False


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Items with the same block, or items that must not be cut."""

    items: list[int]
    sizes: list[int]  # ascending
    block: int  # not less than any size if they must not be cut

    def without_gap(self, room: int, shard: int) -> int | None:
        """Which of them to start `room` units before a cut: one to be cut there, or a whole one."""
        largest = self.sizes[-1]
        if room % self.block == 0 and (largest - room <= shard or shard % self.block == 0):
            return len(self.sizes) - 1
        num_whole = bisect_right(self.sizes, room)
        return num_whole - 1 if num_whole else None


def grouped(problem: Problem) -> tuple[Group, ...]:
    """The items, coarsest first: those that must not be cut, then by block."""
    sizes, blocks = problem.sizes, problem.blocks
    members: dict[tuple[bool, int], list[int]] = defaultdict(list)
    for item in sorted(range(len(sizes) - 1, -1, -1), key=sizes.__getitem__):
        is_whole = blocks[item] == sizes[item]
        members[is_whole, 0 if is_whole else blocks[item]].append(item)
    return tuple(
        Group(items, [sizes[item] for item in items], blocks[items[-1]])
        for _, items in sorted(members.items(), reverse=True)
    )


def coarse_first(problem: Problem, groups: Sequence[Group], shard: int) -> tuple[int, ...] | None:
    """The items' offsets, coarsest first, and finer ones in the room that those leave.

        items 0 and 1 must not be cut, item 2 has blocks of 2, shard=10

        0 0 0 0 0 0 2 2 2 2 | 2 2 2 2 1 1 1 1 1 1

    Each step takes one of the coarsest items that can start where the last one ended, or, if
    none can, one that can start soonest. Where no item may be cut this is first-fit-decreasing,
    the usual rule to fill bins.

    Args:
        problem: what to pack.
        groups: its items, as `grouped` gives them.
        shard: the length of a shard.

    Returns:
        None if the items do not fit like this, or if there are too many different blocks to look
        for the coarsest at each step.
    """
    if len(groups) > MOST_GROUPS:
        return None
    left = [replace(group, items=group.items[:], sizes=group.sizes[:]) for group in groups]
    offsets = [0] * len(problem.sizes)
    at, slack = 0, problem.world * shard - problem.total
    while left:
        group, index = _next(left, at, shard)
        size, item = group.sizes.pop(index), group.items.pop(index)
        offset = offsets[item] = earliest(at, size, problem.blocks[item], shard)
        slack -= offset - at
        if slack < 0:
            return None
        at = offset + size
        if not group.sizes:
            left.remove(group)
    return tuple(offsets)


def _next(groups: Sequence[Group], at: int, shard: int) -> tuple[Group, int]:
    """The group, and the index in it, of the item to place at `at`, or soonest after it."""
    room = shard - at % shard
    for group in groups:
        index = group.without_gap(room, shard)
        if index is not None:
            return group, index
    group = min(groups, key=lambda group: earliest(at, group.sizes[-1], group.block, shard))
    return group, len(group.sizes) - 1


def _by_kind(problem: Problem) -> dict[Kind, list[int]]:
    """The items of each kind, in the order of their indices."""
    kinds: dict[Kind, list[int]] = defaultdict(list)
    for item, kind in enumerate(zip(problem.sizes, problem.blocks, strict=True)):
        kinds[kind].append(item)
    return kinds
