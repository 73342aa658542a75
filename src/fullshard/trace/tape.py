"""Record the actions of engines while they run, in a list of tuples, at little cost.

This code runs at every action of a step, so look-ups, formatting and sums are left for later
(``trace/steps.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from fullshard.device import BufferKind, Lane, Stamp
from fullshard.engine import Engine
from fullshard.errors import ProtocolError
from fullshard.schedule import Action, Event, Op
from fullshard.schedule.triggers import (
    NO_TASK,
    Follows,
    ForwardEnter,
    ForwardExit,
    TaskEnd,
    Trigger,
    WeightsChanged,
)
from fullshard.trace.steps import ACTED, ACTS, HEARD, HELD, SegmentKind, TapeSegment

MOST_ENTRIES = 100_000
"""Entries after which a step is cut, so that a loop without optimizer steps stays bounded."""

_LANES = {
    Op.UNSHARD: Lane.GATHER,
    Op.WAIT: Lane.COMPUTE,
    Op.FINISH_GATHER: Lane.COMPUTE,
    Op.REDUCE_SCATTER: Lane.REDUCE,
    Op.ALL_REDUCE: Lane.REDUCE,
    Op.KEEP_PARTIAL: Lane.REDUCE,
    Op.FINISH_REDUCE: Lane.COMPUTE,
}
"""The lanes on which actions take device time; other actions only make lanes wait."""

_now = time.perf_counter


class Tape:
    """The entries of the current step, from all engines of a tree, and the end of the step.

    A step ends with the last change of weights after a backward, and the next forward shows that
    this change was the last. So a step may have any number of backwards, and any number of
    optimizers after them. A forward without gradients before the first training forward of a step
    is evaluation, a segment of its own.
    """

    def __init__(self, done: Callable[[TapeSegment], None], start_s: float) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self.is_cut = False
        self._done = done
        self._since_s = start_s
        self._trains = False  # a forward with gradients has ended
        self._has_grads = False  # a backward has ended
        self._evaluated = False  # an evaluation has ended; its last memory is not freed yet
        self._changed_s: float | None = None  # time of the last change of weights

    def heard(self, trigger: Trigger, depth: int, at_s: float) -> None:
        """Handle a trigger that may end a segment; ``depth`` counts forwards that run."""
        self._end_evaluation()
        kind = type(trigger)
        if kind is ForwardEnter:
            if depth == 1 and trigger.task == NO_TASK:  # type: ignore[union-attr]
                self._begin_forward()
        elif kind is ForwardExit:
            if depth == 0 and trigger.task == NO_TASK:  # type: ignore[union-attr]
                self._end_forward(trigger)  # type: ignore[arg-type]
        elif kind is WeightsChanged:
            self._changed_s = at_s
        else:  # if an optimizer steps in backward, the end of backward is the end
            self._has_grads = True
            self._changed_s = None if self._changed_s is None else at_s

    def cut(self, at_s: float) -> None:
        """End a segment in the middle of a step that has too many entries."""
        self.close(SegmentKind.PART, at_s)
        self.is_cut = True

    def close(self, kind: SegmentKind, end_s: float) -> None:
        """Hand over the entries up to ``end_s`` as a segment."""
        entries, after = self.entries, len(self.entries)
        while after and entries[after - 1][1] > end_s:
            after -= 1
        taken = entries[:after]
        del entries[:after]  # all taps share this list
        if self.is_cut:
            kind, self.is_cut = SegmentKind.PART, False
        self._done(TapeSegment(kind, self._since_s, end_s, taken, {}))
        self._since_s = end_s

    def _begin_forward(self) -> None:
        if not self._has_grads:
            self._changed_s = None  # a load, or a write, before training
        elif self._changed_s is not None:
            self.close(SegmentKind.STEP, self._changed_s)
            self._trains = self._has_grads = False
            self._changed_s = None

    def _end_forward(self, trigger: ForwardExit) -> None:
        if trigger.follows >= Follows.BACKWARD:
            self._trains = True
        elif not (trigger.failed or self._trains or self._has_grads):
            self._evaluated = True

    def _end_evaluation(self) -> None:
        if self._evaluated:
            self._evaluated = False
            self.close(SegmentKind.EVALUATION, self.entries[-1][1])

    def end(self) -> None:
        """Hand over the last step if it is complete, and the remaining entries as a part."""
        self._end_evaluation()
        if self._has_grads and self._changed_s is not None:
            self.close(SegmentKind.STEP, self._changed_s)
        self.close(SegmentKind.PART, _now())


def stamp_of(engine: Engine) -> Callable[[Lane], Stamp] | None:
    """Return the function that stamps lanes; None if the host's clock suffices, as on a CPU."""
    runs_with_host = engine.units[-1].device.type == "cpu" and not engine.is_dry
    return None if runs_with_host else engine.lanes.stamp


_MAY_END = frozenset({ForwardEnter, ForwardExit, WeightsChanged, TaskEnd})


class Tap:
    """The recorder, observer and watch of one engine; unit 0 has number ``base`` in the tree."""

    def __init__(self, engine: Engine, base: int, tape: Tape) -> None:
        self.engine = engine
        self._base = base
        self._tape = tape
        self._entries = tape.entries
        self._append = tape.entries.append
        self._recorder, self._watch = engine.recorder, engine.meter.watch  # before the trace
        self._stamp = stamp_of(engine)
        self._lanes: list[Lane | None] = []  # lanes of the actions that have begun

    def attach(self) -> None:
        """Start to listen; an earlier recorder and watch still get their events.

        Raises:
            ProtocolError: the engine has an observer, such as another trace; nothing has changed.
        """
        engine = self.engine
        if engine.observer is not None:
            what = "another trace" if isinstance(engine.observer, Tap) else repr(engine.observer)
            raise ProtocolError(
                f"trace: units of this model are observed by {what} already; expected a model "
                "that nothing observes: stop the other trace first, or trace the root once"
            )
        engine.recorder = engine.observer = self
        engine.meter.watch = self.resized

    def detach(self) -> None:
        """Put back the earlier recorder and watch."""
        self.engine.recorder, self.engine.meter.watch = self._recorder, self._watch
        self.engine.observer = None

    def record(self, event: Event) -> None:
        """See ``Recorder``."""
        trigger, at_s = event.trigger, _now()
        if type(trigger) in _MAY_END:
            self._tape.heard(trigger, self.engine.scheduler.depth, at_s)
        if len(self._entries) >= MOST_ENTRIES:
            self._tape.cut(at_s)
        self._append((HEARD, at_s, trigger, self._base))
        if self._recorder is not None:
            self._recorder.record(event)

    def acting(self, action: Action) -> Tap:
        """See ``Observer``; the innermost action ends first."""
        stamp = None
        if self._stamp is not None:
            lane = _LANES.get(action.op)
            self._lanes.append(lane)
            stamp = None if lane is None else self._stamp(lane)
        self._append((ACTS, _now(), action, self._base, stamp))
        return self

    def __enter__(self) -> None:
        """Do nothing: ``acting`` has recorded the start of the action."""

    def __exit__(self, *_: object) -> None:
        """Record the end of the innermost action."""
        if self._stamp is None:
            self._append((ACTED, _now(), None))
            return
        lane = self._lanes.pop()
        self._append((ACTED, _now(), None if lane is None else self._stamp(lane)))

    def resized(self, kind: BufferKind, nbytes: int, storage: torch.UntypedStorage | None) -> None:
        """See ``StorageMeter.watch``."""
        self._append((HELD, _now(), kind, nbytes, None if storage is None else id(storage)))
        if self._watch is not None:
            self._watch(kind, nbytes, storage)
