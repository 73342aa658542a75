"""Proof that all ranks issue the same collectives in the same order, by the scheduler itself.

Each rank of a pipeline stage runs the microbatches of a step in the order of that stage (one
forward, one backward), and skips experts as it draws them. The experts are skip-tolerant units. In
the first step only the last microbatch reduces gradients; in the second all do, and only the last
one reduces them over replicas (HSDP). Ranks that behave alike are simulated once; the sequence of
every rank is compared with that of the first rank of its stage.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from fullshard.schedule import Action, Scheduler, UnitPolicy, UnitState
from fullshard.schedule import triggers as when

STAGES, MICROBATCHES, BLOCKS, STEPS = 4, 6, 4, 2
MASKS = 2
"""Draws of a rank, which its microbatches use in turn."""
ROOT = 2 * BLOCKS
"""The root's key. Unit ``2 * n`` is the expert inside block ``2 * n + 1``."""


class Behavior(NamedTuple):
    """The part of a rank's program that can differ from that of other ranks.

    Attributes:
        stage: its stage of the pipeline.
        skips: for microbatches in turn, the units that the rank does not run.
    """

    stage: int
    skips: tuple[frozenset[int], ...]


@dataclass(frozen=True)
class Proof:
    """The result of a comparison.

    Attributes:
        ranks: number of ranks that were compared.
        behaviors: number of different behaviors among them.
        collectives: number of collectives of each rank of the first stage.
        apart: ranks that differ from the first rank of their stage, each with where.
    """

    ranks: int
    behaviors: int
    collectives: int
    apart: tuple[tuple[int, str], ...]

    def __str__(self) -> str:
        alike = (
            f"{self.ranks:,} ranks with {self.behaviors:,} different behaviors: in each stage all "
            f"issue the same collectives in the same order, {self.collectives} in the first stage"
        )
        return "\n".join(f"rank {rank}: {where}" for rank, where in self.apart[:8]) or alike


def drawn(rank: int) -> Behavior:
    """Return the behavior of ``rank``, which draws the experts to skip by itself."""
    draw = random.Random(rank)
    masks = (
        frozenset(2 * block for block in range(BLOCKS) if draw.random() < 0.5) for _ in range(MASKS)
    )
    return Behavior(rank % STAGES, tuple(masks))


def prove(ranks: int, behavior: Callable[[int], Behavior] = drawn) -> Proof:
    """Compare the collectives of every rank with those of the first rank of its stage."""
    issued = cache(collectives)
    first: dict[int, tuple[Action, ...]] = {}
    seen, apart = set(), []
    for rank in range(ranks):
        own = behavior(rank)
        seen.add(own)
        expected = first.setdefault(own.stage, issued(own))
        if issued(own) != expected:
            apart.append((rank, _difference(issued(own), expected)))
    return Proof(ranks, len(seen), len(first[0]), tuple(apart))


def _difference(own: tuple[Action, ...], expected: tuple[Action, ...]) -> str:
    for number, (one, other) in enumerate(zip(own, expected, strict=False)):
        if one != other:
            return f"collective {number} is {one}, expected {other}"
    return f"{len(own)} collectives, expected {len(expected)}"


def collectives(behavior: Behavior) -> tuple[Action, ...]:
    """Return the collectives that a rank with this behavior issues in all steps, in order."""
    run = _Run(behavior)
    for step in range(STEPS):
        run.step(reduces_each=step % 2 == 1)
    return tuple(action for action in run.issued if action.op.starts)


class _Run:
    def __init__(self, behavior: Behavior) -> None:
        self._behavior = behavior
        self._machine = Scheduler()
        self._policies: dict[int, UnitPolicy] = {}
        units = []
        for key in range(ROOT + 1):
            policy = UnitPolicy(skip_tolerant=key < ROOT and key % 2 == 0)
            inside = ROOT if key == ROOT else key % 2
            units.append(UnitState(key, 100, num_inside=inside, replicated=True, policy=policy))
            self._policies[key] = policy
        self._machine.add(*units)
        self._num_tasks = 0
        self.issued: list[Action] = []

    def step(self, *, reduces_each: bool) -> None:
        """Run the microbatches in the order of this stage: forwards ahead, then one of each."""
        ahead = min(STAGES - 1 - self._behavior.stage, MICROBATCHES)
        waiting: list[dict[int, int]] = []
        left = MICROBATCHES
        for number in range(MICROBATCHES + ahead):
            if number < MICROBATCHES:
                skips = self._behavior.skips[number % len(self._behavior.skips)]
                waiting.append(self._forward(skips))
            if number >= ahead:
                left -= 1
                self._set_policies(reduces=reduces_each or not left, over_replicas=not left)
                self._backward(waiting.pop(0))
        self._say(when.WeightsChanged())

    def _say(self, trigger: when.Trigger) -> None:
        self.issued += self._machine.on(trigger)

    def _set_policies(self, *, reduces: bool, over_replicas: bool) -> None:
        for key, policy in self._policies.items():
            changed = replace(
                policy, requires_gradient_sync=reduces, requires_all_reduce=over_replicas
            )
            self._say(when.SetPolicy(key, changed))

    def _forward(self, skips: frozenset[int]) -> dict[int, int]:
        """Run a forward; return the index of the use of each unit that ran."""
        uses: dict[int, int] = {}
        self._enter(ROOT, uses)
        for expert in range(0, ROOT, 2):
            if expert + 1 in skips:
                continue
            self._enter(expert + 1, uses)
            if expert not in skips:
                self._enter(expert, uses)
                self._say(when.ForwardExit(expert))
            self._say(when.ForwardExit(expert + 1))
        self._say(when.ForwardExit(ROOT))
        return uses

    def _enter(self, unit: int, uses: dict[int, int]) -> None:
        self._say(when.ForwardEnter(unit))
        uses[unit] = self._machine.current_use

    def _backward(self, uses: dict[int, int]) -> None:
        task, self._num_tasks = self._num_tasks, self._num_tasks + 1
        self._say(when.BackwardEnter(ROOT, uses[ROOT], task, until=max(uses.values())))
        for block in range(ROOT - 1, 0, -2):
            inner = [unit for unit in (block, block - 1) if unit in uses]
            until = max((uses[unit] for unit in inner), default=-1)
            for unit in inner:
                self._say(when.BackwardEnter(unit, uses[unit], task, until=until))
            for unit in reversed(inner):
                self._say(when.GradsReady(unit, task))
        self._say(when.GradsReady(ROOT, task))
        self._say(when.TaskEnd(task))
