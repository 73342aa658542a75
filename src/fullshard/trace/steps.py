"""Keep the last and the slowest steps of a trace in full, and sums of all steps.

This code runs once a step, during training. The entries are interpreted only after the end of a
trace (``trace/reading.py``).
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fullshard.schedule import Op
from fullshard.schedule.triggers import (
    BackwardEnter,
    ForwardEnter,
    ForwardExit,
    TaskDied,
    UserUnshard,
    UserWait,
)

HEARD, ACTS, ACTED, HELD = range(4)
"""First elements of entries. An entry is a tuple; its time is the second element, and these follow:

    HEARD   trigger, number of its engine's unit 0.
    ACTS    action that begins, number of its engine's unit 0, stamp of its lane or None.
    ACTED   stamp of the lane of the innermost action, which ends.
    HELD    kind of a buffer, growth in bytes, id of its storage or None.
"""

MOST_KEPT = 100_000
"""Entries of all steps kept in full; beyond this number the oldest steps are dropped."""

NUM_SLOWEST = 3
"""Number of the slowest steps, which are kept in full."""

_BEHIND = 4  # segments that may wait for their device times

NO_UNIT = -1

_ENTERS = frozenset({ForwardEnter, BackwardEnter, UserWait, UserUnshard})

# Looking up an enum member takes longer than the work that needs the member.
_UNSHARD, _FINISH = Op.UNSHARD, Op.FINISH_REDUCE
_WAITS = (Op.WAIT, Op.FINISH_GATHER)
_RESHARD, _TO_SECONDARY = Op.RESHARD, Op.RESHARD_TO_SECONDARY


class SegmentKind(enum.StrEnum):
    """The kind of a segment."""

    STEP = "step"
    EVALUATION = "evaluation"
    PART = "part"
    """A part of a step that was cut or did not finish."""


class TapeSegment(NamedTuple):
    """The entries of the tape between two moments."""

    kind: SegmentKind
    start_s: float
    end_s: float
    entries: list[tuple[Any, ...]]
    held: dict[str, int]
    """Bytes of buffers by kind at the end of the segment."""
    allocated_nbytes: int | None = None
    """Bytes of tensors on the device at the end of the segment; None if unknown."""


class Missed(NamedTuple):
    """A prefetched unit that was resharded before its use."""

    unit: int
    guessed_in: int
    """The unit that ran when the guess was made."""
    came: int
    """The unit that ran instead; NO_UNIT: the pass ended."""


@dataclass(slots=True)
class Sum:
    """The count, sum and maximum of durations."""

    count: int = 0
    total_s: float = 0.0
    most_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count ``seconds``."""
        self.count += 1
        self.total_s += seconds
        if seconds > self.most_s:
            self.most_s = seconds


class Clock(NamedTuple):
    """The host's time at which a lane reached a stamp.

    Each segment measures from its own first stamp, because a device returns differences as 32-bit
    floats. After an hour, their error would be a quarter of a millisecond.
    """

    at_s: float
    stamp: Any

    def time_of(self, stamp: Any) -> float | None:
        """Return the time of ``stamp``; None without a stamp, or before its lane has reached it."""
        if stamp is None or self.stamp is None:
            return None
        since: float | None = stamp.seconds_since(self.stamp)
        return None if since is None else self.at_s + since

    def moved_to(self, entries: Iterable[tuple[Any, ...]]) -> Clock:
        """Return a clock that measures from the first stamp of ``entries``."""
        first = next((e[4] for e in entries if e[0] == ACTS and e[4] is not None), None)
        at_s = self.time_of(first)
        return self if at_s is None else Clock(at_s, first)

    def is_past(self, segment: TapeSegment) -> bool:
        """Return whether the device has done all work of ``segment``."""
        stamps = (e[2] for e in reversed(segment.entries) if e[0] == ACTED)
        last = next((stamp for stamp in stamps if stamp is not None), None)
        return last is None or self.time_of(last) is not None


class KeptSegment(NamedTuple):
    """A segment that is kept in full."""

    number: int
    segment: TapeSegment
    clock: Clock
    missed: list[Missed]


@dataclass(slots=True)
class UnitSums:
    """Sums over all steps of one unit, outside of evaluations."""

    gathers: int = 0
    """The number of its gathers."""
    gather: Sum = field(default_factory=Sum)
    """The time that computation waited for the unit's gathers."""
    reduction: Sum = field(default_factory=Sum)
    """The time that computation waited for the unit's reductions."""


class History:
    """The steps of a trace, in memory with a bound independent of their number.

    Attributes:
        units: sums of each unit.
        missed: number of times that each guess was wrong outside of evaluations.
        spent: durations by kind of segment.
        first_s: seconds of the first step, which the sums leave out if there are others; it
            allocates memory, and code may be compiled in it.
        last: the segment added last, of any kind.
    """

    def __init__(self, keep: int, num_units: int, clock: Clock) -> None:
        self.units = [UnitSums() for _ in range(num_units)]
        self.missed: Counter[Missed] = Counter()
        self.spent = {kind: Sum() for kind in SegmentKind}
        self.first_s: float | None = None
        self._num_steps = 0
        self.last: KeptSegment | None = None
        self._clock = clock
        self._recent: deque[KeptSegment] = deque(maxlen=keep)
        self._slowest: list[tuple[float, int, KeptSegment]] = []
        self._waiting: deque[TapeSegment] = deque()

    def add(self, segment: TapeSegment) -> None:
        """Add a segment, later if the device has not finished its work yet."""
        waiting = self._waiting
        waiting.append(segment)
        while waiting and (len(waiting) > _BEHIND or self._clock.is_past(waiting[0])):
            self._take(waiting.popleft())

    def end(self) -> None:
        """Add the segments that still wait for the device."""
        while self._waiting:
            self._take(self._waiting.popleft())

    @property
    def kept(self) -> list[KeptSegment]:
        """The steps that are kept in full, in order."""
        steps = {one.number: one for *_, one in self._slowest}
        steps |= {one.number: one for one in self._recent}
        return [steps[number] for number in sorted(steps)]

    def _take(self, segment: TapeSegment) -> None:
        is_step = segment.kind is SegmentKind.STEP
        self._num_steps += is_step
        if is_step and self._num_steps == 2:
            self.first_s = self.spent[SegmentKind.STEP].total_s
            self.spent[SegmentKind.STEP] = Sum()
            self.units = [UnitSums() for _ in self.units]
        self.spent[segment.kind].add(segment.end_s - segment.start_s)
        self._clock = self._clock.moved_to(segment.entries)
        is_evaluation = segment.kind is SegmentKind.EVALUATION
        missed = self._add_up(
            segment, [UnitSums() for _ in self.units] if is_evaluation else self.units
        )
        if not is_evaluation:
            self.missed.update(missed)
        number = self._num_steps + (not is_step)
        self.last = kept = KeptSegment(number, segment, self._clock, missed)
        if is_step:
            self._keep(kept)

    def _add_up(self, segment: TapeSegment, units: Sequence[UnitSums]) -> list[Missed]:
        """Add to the sums of ``units``, and return the guesses that missed.

        A guess is a gather that begins while another unit runs. The guess missed if the gathered
        unit is resharded before it runs. (The resharding waits for the gather first, because a
        buffer cannot be freed while a collective writes into it.)
        """
        entered = NO_UNIT
        guessed: dict[int, int] = {}  # unit -> the unit that ran at the guess
        began: list[tuple[Any, ...]] = []  # actions that have begun
        missed = []
        for entry in segment.entries:
            what = entry[0]
            if what == ACTS:
                began.append(entry)
                action = entry[2]
                op = action.op
                if op is _UNSHARD:
                    unit = entry[3] + action.unit
                    units[unit].gathers += 1
                    if unit != entered:
                        guessed[unit] = entered
                elif guessed and (op is _RESHARD or op is _TO_SECONDARY):
                    unit = entry[3] + action.unit
                    if unit in guessed:
                        missed.append(Missed(unit, guessed.pop(unit), entered))
            elif what == ACTED:
                if began:  # else the action began in a segment that was cut
                    self._waited(began.pop(), entry, units)
            elif what == HEARD:
                trigger = entry[2]
                entered = NO_UNIT
                if type(trigger) in _ENTERS:
                    entered = entry[3] + trigger.unit
                    guessed.pop(entered, None)
                elif guessed and _failed(trigger):
                    guessed.clear()
        return missed

    def _waited(
        self, began: tuple[Any, ...], ended: tuple[Any, ...], units: Sequence[UnitSums]
    ) -> None:
        """Add the time of an action to the waits of its unit, if computation waits in it."""
        action = began[2]
        op = action.op
        if op in _WAITS:
            total = units[began[3] + action.unit].gather
        elif op is _FINISH:
            total = units[began[3] + action.unit].reduction
        else:
            return
        took_s = None if began[4] is None else lane_time(self._clock, began[4], ended[2])[1]
        total.add(ended[1] - began[1] if took_s is None else took_s)

    def _keep(self, kept: KeptSegment) -> None:
        self._recent.append(kept)
        sizes = [len(one.segment.entries) for one in self._recent]
        while len(sizes) > 1 and sum(sizes) > MOST_KEPT:
            self._recent.popleft()
            del sizes[0]
        duration_s = kept.segment.end_s - kept.segment.start_s
        heapq.heappush(self._slowest, (duration_s, kept.number, kept))
        if len(self._slowest) > NUM_SLOWEST:
            heapq.heappop(self._slowest)


def _failed(trigger: Any) -> bool:
    """Return whether a trigger reports an exception, after which open guesses are not wrong."""
    kind = type(trigger)
    return kind is TaskDied or (kind is ForwardExit and trigger.failed)


def lane_time(clock: Clock, began: Any, ended: Any) -> tuple[float | None, float | None]:
    """Return a lane's start of an action, and its seconds; None for a figure that is unknown."""
    start_s, end_s = clock.time_of(began), clock.time_of(ended)
    if start_s is None or end_s is None:
        return None, None
    return start_s, end_s - start_s
