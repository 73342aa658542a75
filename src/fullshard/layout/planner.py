"""The cut planner: finds the shortest shards it can, and the offsets of the parameters in them.

Finding the best order of parameters is bin packing, so NP-hard. Items may also fit worse in a
longer shard, because other blocks divide its length. So the search tries lengths upwards from a
proven bound (`bound`). For each length it tries these orders, until the items fit.

    as given       nothing is moved.
    coarse first   greedy.

If the first few lengths all fail, the search continues by halving. Layers of real models fit at the
bound, as given, or nearly so. The plan is arithmetic on the arguments, and its limits count steps,
not seconds, so every rank computes the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate

from fullshard.layout.bound import ShardSizes
from fullshard.layout.orders import Group, coarse_first, grouped
from fullshard.layout.packing import Problem, common_multiple, in_order
from fullshard.layout.spec import round_up

# Limits per plan, so that a plan takes tenths of a second at most:
MOST_IN_A_ROW = 4_000  # items placed while trying consecutive lengths, at most 256 of them
MOST_BY_HALVES = 50_000  # items placed while halving the range of lengths, 5 to 64 times


@dataclass(frozen=True, slots=True)
class CutPlan:
    """The length of the shards and the offsets of the items, in units."""

    shard: int
    offsets: tuple[int, ...]


@lru_cache(maxsize=32)  # the layers of a model are alike
def plan(problem: Problem) -> CutPlan:
    """Place the items so that the shards are short.

    The shards are as short as possible if their length is `ShardSizes.bound`, and never longer than
    in `_easy_plan`.
    """
    if not problem.sizes:
        return CutPlan(0, ())
    sizes, attempt = ShardSizes.of(problem), partial(_attempt, problem, grouped(problem))
    shard = sizes.bound
    for _ in range(1 + min(MOST_IN_A_ROW // len(problem.sizes), 256)):
        if found := attempt(shard):
            return found
        shard = sizes.at_least(shard + 1)
    return _by_halves(sizes, attempt, low=shard, best=_easy_plan(problem))


def _attempt(problem: Problem, groups: Sequence[Group], shard: int) -> CutPlan | None:
    """Return a plan with shards of this length, found in one of the ways; None if none fits."""
    offsets = in_order(problem, range(len(problem.sizes)), shard)
    if offsets is None:
        offsets = coarse_first(problem, groups, shard)
    return None if offsets is None else CutPlan(shard, offsets)


def _by_halves(
    sizes: ShardSizes, attempt: Callable[[int], CutPlan | None], *, low: int, best: CutPlan
) -> CutPlan:
    """Search from `low` to the length of `best`, as if items that fit also fit in longer shards.

    Each step halves the order of magnitude of the excess over the bound:

        bound |-|---|-------|---------------| best
    """
    high = best.shard
    for _ in range(min(max(MOST_BY_HALVES // len(best.offsets), 5), 64)):
        if low >= high:
            break
        excess = math.isqrt((low - sizes.bound + 1) * (high - sizes.bound + 1))
        middle = sizes.bound + excess - 1
        shard = sizes.at_least(middle)
        if shard >= high:
            high = middle
        elif found := attempt(shard):
            best, high = found, shard
        else:
            low = shard + 1
    return best


def _easy_plan(problem: Problem) -> CutPlan:
    """Return a plan that is easy to find: as given, with a shard that all blocks divide.

    Then an item with a cut need only start at a multiple of its block. That wastes less than the
    common multiple of all blocks before each cut, so shards one such multiple longer than the
    volume needs are long enough. A single shard with everything in it need not be a multiple.
    """
    multiple = common_multiple(problem.blocks, problem.total)
    least = round_up(-(-problem.total // problem.world), multiple)
    order = range(len(problem.sizes))
    for shard in (least, least + multiple):
        if shard < problem.total and (offsets := in_order(problem, order, shard)):
            return CutPlan(shard, offsets)
    return CutPlan(problem.total, tuple(accumulate(problem.sizes, initial=0))[:-1])
