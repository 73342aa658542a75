"""The cut planner: the shortest shards it can find, and where the parameters lie in them.

The best order of parameters is a bin packing, so NP-hard, and a longer shard may fit worse,
because it matters which blocks divide it. So the search goes over the lengths of shard, upwards
from a proven bound (`bound`), and asks of each whether the items fit

    as given       then nothing is moved
    in any order   of few kinds of items, such as those of a layer: exact
    coarse first   greedy

until they do. If they fit in none of the first few, it goes on by halves. Layers of real models
end at the bound, as given. All of it is arithmetic on the arguments, and what limits it counts
steps, not seconds: every rank comes to the same plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

from fullshard.layout.bound import ShardSizes
from fullshard.layout.orders import (
    Budget,
    Group,
    any_order,
    coarse_first,
    grouped,
    has_few_orders,
)
from fullshard.layout.packing import Problem, common_multiple, in_order
from fullshard.layout.spec import round_up

# For one plan, so that it takes tenths of a second at most:
MOST_TRIES = 30_000  # of an item at an offset, by `any_order`
MOST_IN_A_ROW = 4_000  # items placed for lengths that follow each other, of which at most 256
MOST_BY_HALVES = 50_000  # items placed for lengths that halve the rest, of which 5 to 64


@dataclass(frozen=True, slots=True)
class Plan:
    """How long the shards are and where the items lie, in units."""

    shard: int
    offsets: tuple[int, ...]


@lru_cache(maxsize=32)  # the layers of a model are alike
def plan(problem: Problem) -> Plan:
    """Place the items so that the shards are short.

    They are as short as can be if they are as long as `ShardSizes.bound`, or if `any_order` saw
    all orders for all lengths from there on. They are never longer than `_easy_plan` makes them.
    """
    if not problem.sizes:
        return Plan(0, ())
    sizes, attempt = ShardSizes.of(problem), _Attempt.of(problem)
    shard = sizes.bound
    for _ in range(1 + min(MOST_IN_A_ROW // len(problem.sizes), 256)):
        if found := attempt.at(shard):
            return found
        shard = sizes.at_least(shard + 1)
    return _by_halves(sizes, attempt, low=shard, best=_easy_plan(problem))


@dataclass(slots=True)
class _Attempt:
    """Whether the items fit into shards of some length, tried in each way in turn."""

    problem: Problem
    groups: tuple[Group, ...]
    few_orders: bool
    budget: Budget = field(default_factory=lambda: Budget(MOST_TRIES))

    @classmethod
    def of(cls, problem: Problem) -> _Attempt:
        return cls(problem, grouped(problem), has_few_orders(problem))

    def at(self, shard: int) -> Plan | None:
        offsets = in_order(self.problem, range(len(self.problem.sizes)), shard)
        if offsets is None and self.few_orders:
            offsets = any_order(self.problem, shard, self.budget)
        if offsets is None:
            offsets = coarse_first(self.problem, self.groups, shard)
        return None if offsets is None else Plan(shard, offsets)


def _by_halves(sizes: ShardSizes, attempt: _Attempt, *, low: int, best: Plan) -> Plan:
    """Go on from `low` to the length of `best`, as if what fits in a shard fits in all longer ones.

    It halves the order of magnitude of the excess over the bound:

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
        elif found := attempt.at(shard):
            best, high = found, shard
        else:
            low = shard + 1
    return best


def _easy_plan(problem: Problem) -> Plan:
    """A plan that is easy to find: as given, in shards that are a common multiple of all blocks.

    Then what is cut need only start at a multiple of its block. That wastes less than the common
    multiple before each cut, so shards that are one multiple longer than the volume needs are
    long enough. One shard with everything in it need not be a multiple.
    """
    multiple = common_multiple(problem.blocks, problem.total)
    least = round_up(-(-problem.total // problem.world), multiple)
    order = range(len(problem.sizes))
    for shard in (least, least + multiple):
        if shard < problem.total and (offsets := in_order(problem, order, shard)):
            return Plan(shard, offsets)
    return Plan(problem.total, tuple(accumulate(problem.sizes, initial=0))[:-1])
