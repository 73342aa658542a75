"""Search for the fastest way to shard and run a model that fits in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fullshard.engine import CPUOffloadPolicy
from fullshard.errors import FullshardError
from fullshard.frontend import Choice
from fullshard.layout import PerParameter, Ragged
from fullshard.plan.plan import Plan, Tried

_GAIN = 0.995
"""A change must bring time, or excess memory, below this share of the old; else the old stays."""


@dataclass
class Search:
    """A search from one choice to better ones, each tried by a dry run.

    First comes the arrangement (layout, replicas), then the smallest number of recomputed blocks
    that fits, with or without offload. Then come changes that trade memory for time: unsharded
    parameters kept after forward, several blocks per unit, and larger budgets. ``fixed`` names
    fields that the user has set.
    """

    plan_for: Callable[[Choice], Plan]
    best: Choice
    fixed: Collection[str]
    num_blocks: int
    shapes: list[int]
    """Numbers of replicas to try."""
    target_s: float | None
    plans: dict[Choice, Plan] = field(default_factory=dict)
    """The plans of the choices that were tried."""

    def run(self) -> Plan:
        """Return the plan for the best choice, with all choices that were tried."""
        self._look_at(self.best)
        for change in self._arrangements():
            self._try(**change)
        self._make_fit()
        for change in self._trades():
            self._try(**change)
        order = sorted(self.plans, key=self._rank)
        if self.target_s is None and self._look_at(self.best).fits:
            order.sort(key=lambda choice: choice != self.best)  # others are not clearly faster
        plans = [(choice, self.plans[choice]) for choice in order]
        tried = tuple(
            Tried(choice, plan.peak_nbytes, plan.host_nbytes, plan.step_s, plan.fits)
            for choice, plan in plans
        )
        return replace(plans[0][1], choice=order[0], tried=tried)

    def _rank(self, choice: Choice) -> tuple[float, ...]:
        """Return a sort key: fast enough by memory, then fitting by time, then by excess bytes."""
        plan = self._look_at(choice)
        if not plan.fits:
            return 2, plan.excess_nbytes, 0
        if self.target_s is not None and plan.step_s <= self.target_s:
            return 0, plan.peak_nbytes, plan.step_s
        return 1, plan.step_s, plan.peak_nbytes

    def _arrangements(self) -> Iterator[dict[str, Any]]:
        if self._look_at(self.best).padded_nbytes and isinstance(self.best.layout, PerParameter):
            yield {"layout": Ragged()}
        for replicas in self.shapes:
            yield {"replicas": replicas}

    def _trades(self) -> Iterator[dict[str, Any]]:
        yield {"reshard_after_forward": False}
        for blocks in (2, 4, 8):
            if blocks <= self.num_blocks and 2 * self.best.blocks_per_unit == blocks:
                yield {"blocks_per_unit": blocks}
        largest = max(unit.unsharded_nbytes for unit in self._look_at(self.best).units)
        for units in (2, 4):
            yield {"prefetch_nbytes": units * largest}
        for units in (2, 4):
            yield {"reduction_nbytes": 2 * units * largest}

    def _make_fit(self) -> None:
        """Recompute the fewest blocks that fit, with offload if the steps are then faster.

        With ``target_s``, offload is also tried if the model fits without it.
        """
        found = [self._recomputing(self.best)]
        here = self._look_at(found[0])
        wanted = self.target_s is not None or not self._look_at(self.best).fits
        if wanted and "offload_policy" not in self.fixed:
            away = replace(self.best, offload_policy=CPUOffloadPolicy())
            plan = self._look_if_possible(away)
            wants_it = self.target_s is not None or not here.fits
            # Recomputation costs time, so offload may be faster.
            if plan is not None and (wants_it or plan.step_s < here.step_s):
                found.append(self._recomputing(away))
        self.best = min(found, key=self._rank)

    def _recomputing(self, start: Choice) -> Choice:
        """Return ``start`` with the fewest recomputed blocks that fit, else of the least excess."""
        low = self._look_at(start)
        if low.fits or not self.num_blocks:
            return start
        all_of_them = replace(start, recomputed=self.num_blocks)
        high = self._look_at(all_of_them)
        if not high.fits:
            return all_of_them if high.excess_nbytes < low.excess_nbytes else start
        share = low.excess_nbytes / max(1, low.peak_nbytes - high.peak_nbytes)
        guess = math.ceil(share * self.num_blocks)
        return replace(start, recomputed=self._fewest(start, guess))

    def _fewest(self, start: Choice, guess: int) -> int:
        """Return the fewest recomputed blocks that fit; 0 is known not to fit, all is known to."""
        least, most = 0, self.num_blocks
        while most - least > 1:
            probe = guess if least < guess < most else (least + most) // 2
            if self._look_at(replace(start, recomputed=probe)).fits:
                most, guess = probe, probe - 1  # a good guess is confirmed by its neighbour
            else:
                least, guess = probe, probe + 1
            if guess in (least, most):
                guess = 0
        return most

    def _try(self, **change: Any) -> None:
        """Keep a change that fits and is faster; if ``best`` does not fit, one with less excess."""
        if any(name in self.fixed for name in change):
            return
        now, then = self._look_at(self.best), replace(self.best, **change)
        if then == self.best:
            return
        found = self._look_if_possible(then)
        if found is None:
            return
        if now.fits:
            better = found.fits and found.step_s < _GAIN * now.step_s
        else:
            better = found.fits or found.excess_nbytes < _GAIN * now.excess_nbytes
        if better:
            self.best = then

    def _look_if_possible(self, choice: Choice) -> Plan | None:
        """Return the plan; None if the model cannot be sharded this way."""
        try:
            return self._look_at(choice)
        except FullshardError:
            return None

    def _look_at(self, choice: Choice) -> Plan:
        if choice not in self.plans:
            self.plans[choice] = self.plan_for(choice)
        return self.plans[choice]
