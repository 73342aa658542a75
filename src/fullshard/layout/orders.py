"""Orders in which the items fit into shards of a given length.

An order decides all offsets: each item is placed as early as possible (`in_order`). So only the
order must be found, and `coarse_first` finds one greedily.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fullshard.layout.packing import Problem, earliest

MOST_GROUPS = 64  # limit of `coarse_first` on the number of groups


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
