"""Orders in which the items fit into shards of a given length.

An order decides all offsets: each item is placed as early as possible (`in_order`). So only the
order must be found. `any_order` is exact, for few kinds of items; `coarse_first` is greedy.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fullshard.layout.packing import Problem, earliest

Kind = tuple[int, int]  # size and block; items of a kind are placed in index order

MOST_ITEMS = 64  # limit of `any_order`, which is recursive
MOST_REMAINDERS = 4096  # limit of `any_order` on the combinations of items left of each kind
MOST_GROUPS = 64  # limit of `coarse_first` on the number of groups


@dataclass(slots=True)
class Budget:
    """The number of items that may still be tried; counted, not timed, so that all ranks agree."""

    left: int


def has_few_orders(problem: Problem) -> bool:
    """Return whether `any_order` can try all orders: always for 12 items, more if many match."""
    if len(problem.sizes) > MOST_ITEMS:
        return False
    return math.prod(len(items) + 1 for items in _by_kind(problem).values()) <= MOST_REMAINDERS


def any_order(problem: Problem, shard: int, budget: Budget) -> tuple[int, ...] | None:
    """Return the items' offsets in the first order that fits, or None if none is found.

    Orders are tried lexicographically, so items stay in index order as long as the rest still
    fits. The search is depth-first. For each combination of items left to place, it remembers the
    least offset from which these items did not fit. It gives up when `budget` is used up.
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
    items: dict[Kind, list[int]]  # not placed yet; the next item of each kind is last
    budget: Budget
    offsets: dict[int, int] = field(default_factory=dict)
    too_late: dict[tuple[int, ...], int] = field(default_factory=dict)

    def place(self, at: int, volume: int) -> bool:
        """Place all remaining items, `volume` units, from `at` on; return whether they fit."""
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
    block: int  # at least the largest size if the items must not be cut

    def without_gap(self, room: int, shard: int) -> int | None:
        """Return the index of an item to start `room` units before a cut: cut there, or whole."""
        largest = self.sizes[-1]
        if room % self.block == 0 and (largest - room <= shard or shard % self.block == 0):
            return len(self.sizes) - 1
        num_whole = bisect_right(self.sizes, room)
        return num_whole - 1 if num_whole else None


def grouped(problem: Problem) -> tuple[Group, ...]:
    """Return the items in groups, coarsest first: items that must not be cut, then by block."""
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
    """Return the items' offsets, placing coarse items first and finer items in the gaps.

    Each step takes one of the coarsest items that can start where the previous item ended. If there
    is none, it takes an item that can start soonest. If no item may be cut, this is
    first-fit-decreasing, the usual rule for bin packing.

    In the example, items 0 and 1 must not be cut, item 2 has blocks of 2, and shard=10.

        0 0 0 0 0 0 2 2 2 2 | 2 2 2 2 1 1 1 1 1 1

    Args:
        problem: the problem to solve.
        groups: the items of `problem`, as returned by `grouped`.
        shard: the length of a shard.

    Returns:
        The offsets; None if the items do not fit this way, or if there are too many different
        blocks to look for the coarsest item at each step.
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
    """Return the item to place at `at` or soonest after, as a group and an index in that group."""
    room = shard - at % shard
    for group in groups:
        index = group.without_gap(room, shard)
        if index is not None:
            return group, index
    group = min(groups, key=lambda group: earliest(at, group.sizes[-1], group.block, shard))
    return group, len(group.sizes) - 1


def _by_kind(problem: Problem) -> dict[Kind, list[int]]:
    """Return the items of each kind, in index order."""
    kinds: dict[Kind, list[int]] = defaultdict(list)
    for item, kind in enumerate(zip(problem.sizes, problem.blocks, strict=True)):
        kinds[kind].append(item)
    return kinds
