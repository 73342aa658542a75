"""A simulated model that walks through training steps, and sends triggers as hooks would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from fullshard.schedule import Action, Event, Op, Scheduler, Transcript, UnitPolicy, UnitState
from fullshard.schedule import triggers as when
from fullshard.schedule.triggers import NO_TASK, Accumulates, Follows, Trigger

__all__ = ["Walk"]


@dataclass
class Walk:
    """``num_blocks`` units below a root; ``say`` passes a trigger on, and checks the actions.

    For all triggers, each unit is gathered, waited for and resharded in this order, and each
    reduction that was started is finished once.
    """

    num_blocks: int
    nbytes: int = 100
    policy: UnitPolicy = field(default_factory=UnitPolicy)
    replicated: bool = False
    machine: Scheduler = field(default_factory=Scheduler)
    transcript: Transcript = field(default_factory=Transcript)

    def __post_init__(self) -> None:
        self.root = self.num_blocks
        for unit in range(self.num_blocks + 1):
            self.machine.add(
                UnitState(
                    unit,
                    nbytes=self.nbytes,
                    num_inside=self.num_blocks if unit == self.root else 0,
                    replicated=self.replicated,
                    policy=self.policy,
                )
            )
        self._tasks = count()
        self._gathered: dict[int, str] = {}
        self._reducing: dict[int, str] = {}
        self._partial: set[int] = set()
        self.most_held = 0

    def say(self, trigger: Trigger) -> tuple[Action, ...]:
        actions = self.machine.on(trigger)
        self.transcript.record(Event(trigger, actions))
        for action in actions:
            if action.unit is not None:
                self._check(action.op, action.unit)
        return actions

    def _check(self, op: Op, unit: int) -> None:
        was = self._gathered.get(unit, "sharded")
        if op is Op.UNSHARD:
            assert was != "gathering"  # an unsharded or concealed unit may be gathered again
            self._gathered[unit] = "gathering"
        elif op is Op.WAIT:
            assert was in ("gathering", "concealed")
            self._gathered[unit] = "unsharded"
        elif op is Op.FINISH_GATHER:
            assert was == "gathering"
            self._gathered[unit] = "unsharded"
        elif op is Op.CONCEAL:
            assert was == "unsharded"
            self._gathered[unit] = "concealed"
        elif op is Op.RESHARD:
            assert was in ("unsharded", "concealed", "secondary")
            self._gathered[unit] = "sharded"
        elif op is Op.RESHARD_TO_SECONDARY:
            assert was in ("unsharded", "concealed")
            self._gathered[unit] = "secondary"
        else:
            self._check_reduction(op, unit)
        held = self.unsharded - {self.root}
        self.most_held = max(self.most_held, self.nbytes * len(held))

    def _check_reduction(self, op: Op, unit: int) -> None:
        if op is Op.REDUCE_SCATTER:
            assert unit not in self._reducing
            self._reducing[unit] = "over shards"
        elif op is Op.ALL_REDUCE:
            assert self.replicated
            assert self._reducing.get(unit) == "over shards" or unit in self._partial
            self._reducing[unit] = "over replicas"
            self._partial.discard(unit)
        elif op is Op.KEEP_PARTIAL:
            assert self._reducing.pop(unit) == "over shards"
            self._partial.add(unit)
        elif op is Op.FINISH_REDUCE:
            half = self._reducing.pop(unit)
            assert half == ("over replicas" if self.replicated else "over shards")

    @property
    def unsharded(self) -> set[int]:
        return {u for u, now in self._gathered.items() if now not in ("sharded", "secondary")}

    @property
    def secondary(self) -> set[int]:
        return {unit for unit, now in self._gathered.items() if now == "secondary"}

    @property
    def at_rest(self) -> bool:
        held = self.unsharded | self.secondary
        return not held and not self._reducing and self.machine.idle

    # The model.

    def unit_forward(
        self, unit: int, task: int = NO_TASK, follows: Follows = Follows.BACKWARD
    ) -> int:
        self.say(when.ForwardEnter(unit, task=task))
        use = self.machine.current_use
        assert self._gathered[unit] == "unsharded"
        self.say(when.ForwardExit(unit, task=task, follows=follows))
        return use

    def forward(
        self,
        order: Sequence[int] | None = None,
        follows: Follows = Follows.BACKWARD,
        blocks_follow: Follows | None = None,
    ) -> list[tuple[int, int]]:
        """Run a forward; return units and uses in the order of backward."""
        self.say(when.ForwardEnter(self.root))
        met = [(self.root, self.machine.current_use)]
        blocks = [
            (
                unit,
                self.unit_forward(
                    unit, follows=follows if blocks_follow is None else blocks_follow
                ),
            )
            for unit in (range(self.num_blocks) if order is None else order)
        ]
        self.say(when.ForwardExit(self.root, follows=follows))
        return met + blocks[::-1]

    def unit_backward(
        self, unit: int, use: int, task: int, *, last: bool = True, silent: bool = False
    ) -> None:
        accumulates = Accumulates.ELSEWHERE if silent else Accumulates.HERE
        self.say(when.BackwardEnter(unit, use, task, until=use, accumulates=accumulates))
        assert self._gathered[unit] == "unsharded"
        if last and not silent:
            self.say(when.GradsReady(unit, task))

    def root_backward(self, uses: Sequence[tuple[int, int]], task: int) -> None:
        """Enter the root's backward at its output, which is younger than all blocks."""
        youngest = max(use for _, use in uses)
        self.say(when.BackwardEnter(self.root, uses[0][1], task, until=youngest))

    def backward(self, uses: Sequence[tuple[int, int]], *, silent: int | None = None) -> None:
        """Run a backward from the root's output to its parameters; ``silent`` gets no gradients."""
        task = next(self._tasks)
        blocks = uses[1:]
        self.root_backward(uses, task)
        for position, (unit, use) in enumerate(blocks):
            last = unit not in [later for later, _ in blocks[position + 1 :]]
            self.unit_backward(unit, use, task, last=last, silent=unit == silent)
        self.say(when.GradsReady(self.root, task))
        self.say(when.TaskEnd(task))

    def autograd_grad(self, uses: Sequence[tuple[int, int]]) -> None:
        """Run a backward that accumulates no gradients."""
        task = next(self._tasks)
        youngest = max(use for _, use in uses)
        for unit, use in uses:
            until = youngest if unit == self.root else use
            self.say(when.BackwardEnter(unit, use, task, until, Accumulates.NOWHERE))
        self.say(when.TaskEnd(task))

    def new_task(self) -> int:
        return next(self._tasks)

    def step(self, order: Sequence[int] | None = None) -> None:
        self.backward(self.forward(order))
        self.say(when.WeightsChanged())

    def take(self) -> list[str]:
        """Return the actions since the last call, as text."""
        actions = [str(action) for action in self.transcript.actions()]
        self.transcript.events.clear()
        return actions
