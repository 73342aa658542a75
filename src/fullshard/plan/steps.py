"""What is kept of the steps of a trace: the last and the slowest whole, sums of all others.

Entries of the tape, which are written while a step runs, are put together here when it is over.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fullshard.schedule import Op
from fullshard.schedule.triggers import BackwardEnter, ForwardEnter, UserUnshard, UserWait

HEARD, ACTS, ACTED, HELD = range(4)
"""First elements of entries: a trigger, an action that begins, one that ends, a buffer's change."""

MOST_KEPT = 100_000
"""Entries of all steps that are kept whole; beyond these the oldest are only summed."""

NUM_SLOWEST = 3
"""Steps that are kept whole because none of those before them took longer."""

_BEHIND = 4  # segments whose device times are waited for

NO_UNIT = -1

_ENTERS = frozenset({ForwardEnter, BackwardEnter, UserWait, UserUnshard})
_ENDS_GATHER = frozenset({Op.RESHARD, Op.RESHARD_TO_SECONDARY})


class SegmentKind(enum.StrEnum):
    """What the entries between two ends of steps are."""

    STEP = "step"
    EVALUATION = "evaluation"
    PART = "part"
    """A part of a step that is not kept whole, or was not finished."""


class Segment(NamedTuple):
    """The entries between two moments, as the tape has them."""

    kind: SegmentKind
    start_s: float
    end_s: float
    entries: list[tuple[Any, ...]]
    allocated_nbytes: int | None = None
    """Bytes that tensors held on the device when the segment was over."""


class Act(NamedTuple):
    """An action: its unit, by number in the tree, and when it was carried out."""

    op: Op
    unit: int
    start_s: float
    host_s: float
    """Seconds of the host."""
    lane_start_s: float | None = None
    """When its lane of a device got there; None: not known, or no work of a lane."""
    lane_s: float | None = None

    @property
    def took_s(self) -> float:
        """Seconds of the lane if it is known, else of the host."""
        return self.host_s if self.lane_s is None else self.lane_s


class Missed(NamedTuple):
    """A gather ahead of its time for a unit that never came."""

    unit: int
    guessed_in: int
    """The unit that was entered when the guess was made."""
    came: int
    """The unit that came in its stead; NO_UNIT: the pass ended."""


class Change(NamedTuple):
    """A buffer that grew or shrank."""

    at_s: float
    kind: str
    nbytes: int
    unit: int


@dataclass
class Step:
    """What happened in a segment."""

    kind: SegmentKind
    number: int
    start_s: float
    end_s: float
    allocated_nbytes: int | None
    held: dict[str, int]
    """Bytes of buffers by kind when it began."""
    acts: list[Act] = field(default_factory=list)
    heard: list[tuple[float, Any, int]] = field(default_factory=list)
    """Triggers: when, what, and the number of unit 0 of its engine."""
    changes: list[Change] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)

    @property
    def duration_s(self) -> float:
        """Seconds from the end of the step before to the end of this one."""
        return self.end_s - self.start_s

    @property
    def size(self) -> int:
        """How many entries it takes to keep it."""
        return len(self.acts) + len(self.heard) + len(self.changes)


class Sum:
    """The count, sum and maximum of durations."""

    __slots__ = ("count", "most_s", "total_s")

    def __init__(self) -> None:
        self.count = 0
        self.total_s = self.most_s = 0.0

    def add(self, seconds: float) -> None:
        """Count ``seconds``."""
        self.count += 1
        self.total_s += seconds
        if seconds > self.most_s:
            self.most_s = seconds

    def as_json(self) -> dict[str, float]:
        """Return a dict for JSON."""
        return {"count": self.count, "total_s": self.total_s, "most_s": self.most_s}


class Clock:
    """The host's time at which a lane reached a stamp.

    Each segment measures from its own first stamp, because a device tells differences in 32 bits:
    after an hour they would be good to a quarter of a millisecond only.
    """

    def __init__(self, at_s: float, stamp: Any) -> None:
        self._at_s = at_s
        self._stamp = stamp

    def start(self, entries: Iterable[tuple[Any, ...]]) -> None:
        """Measure from the first stamp of ``entries`` from now on."""
        first = next((e[4] for e in entries if e[0] == ACTS and e[4] is not None), None)
        if first is not None and (at_s := self.time_of(first)) is not None:
            self._at_s, self._stamp = at_s, first

    def time_of(self, stamp: Any) -> float | None:
        """Return the time of ``stamp``; None if there is none, or its lane is not there yet."""
        if stamp is None or self._stamp is None:
            return None
        since: float | None = stamp.seconds_since(self._stamp)
        return None if since is None else self._at_s + since


class History:
    """The steps of a trace, in memory that does not grow with their number.

    Attributes:
        exposed: by unit and kind of action (WAIT or FINISH_REDUCE), what computation waited.
        acted: how often each action was carried out on each unit.
        missed: how often each guess was wrong.
        spent: durations by kind of segment.
        held: bytes of buffers that are held now, by unit and kind.
        last: the segment that was taken in last, whatever it was.
    """

    def __init__(self, keep: int, clock: Clock, held: dict[str, int]) -> None:
        self.exposed: dict[tuple[int, Op], Sum] = {}
        self.acted: Counter[tuple[int, Op]] = Counter()
        self.missed: Counter[Missed] = Counter()
        self.spent = {kind: Sum() for kind in SegmentKind}
        self.held = Counter({(NO_UNIT, kind): nbytes for kind, nbytes in held.items() if nbytes})
        self.last: Step | None = None
        self._owners: dict[int, int] = {}  # unit of each buffer, by the id of its storage
        self._clock = clock
        self._recent: deque[Step] = deque(maxlen=keep)
        self._slowest: list[tuple[float, int, Step]] = []
        self._waiting: deque[Segment] = deque()

    def add(self, segment: Segment) -> None:
        """Take in a segment, later if a device has not done its work yet."""
        self._waiting.append(segment)
        while self._waiting and (len(self._waiting) > _BEHIND or self._is_done(self._waiting[0])):
            self._take(self._waiting.popleft())

    def end(self) -> None:
        """Take in all that is left."""
        while self._waiting:
            self._take(self._waiting.popleft())

    @property
    def kept(self) -> list[Step]:
        """The steps that are kept whole, in order."""
        steps = {step.number: step for *_, step in self._slowest}
        steps |= {step.number: step for step in self._recent}
        return [steps[number] for number in sorted(steps)]

    def _is_done(self, segment: Segment) -> bool:
        last = next((e for e in reversed(segment.entries) if e[0] == ACTED and e[2]), None)
        return last is None or self._clock.time_of(last[2]) is not None

    def _take(self, segment: Segment) -> None:
        held = self.held_by_kind()
        number = self.spent[SegmentKind.STEP].count + 1
        step = Step(segment.kind, number, *segment[1:3], segment.allocated_nbytes, held)
        self._clock.start(segment.entries)
        _Reader(step, self).read(segment.entries)
        self._add_up(step)
        self.last = step
        if step.kind is SegmentKind.STEP:
            self._keep(step)

    def _add_up(self, step: Step) -> None:
        self.spent[step.kind].add(step.duration_s)
        self.missed.update(step.missed)
        acted, exposed = self.acted, self.exposed
        for act in step.acts:
            key = act.unit, act.op
            acted[key] += 1
            if act.op is Op.WAIT or act.op is Op.FINISH_REDUCE:
                one = exposed.get(key)
                if one is None:
                    one = exposed[key] = Sum()
                one.add(act.took_s)

    def _keep(self, step: Step) -> None:
        self._recent.append(step)
        while len(self._recent) > 1 and sum(one.size for one in self._recent) > MOST_KEPT:
            self._recent.popleft()
        heapq.heappush(self._slowest, (step.duration_s, step.number, step))
        if len(self._slowest) > NUM_SLOWEST:
            heapq.heappop(self._slowest)

    def held_by_kind(self) -> dict[str, int]:
        """Return the bytes of buffers that are held now, by kind."""
        held: Counter[str] = Counter()
        for (_, kind), nbytes in self.held.items():
            held[kind] += nbytes
        return dict(held)

    def changed(self, kind: str, nbytes: int, storage: int | None, unit: int) -> int:
        """Book a change of a buffer, made in an action of ``unit``; return the unit it is of."""
        if storage is not None:
            if nbytes > 0:
                self._owners[storage] = unit
            else:
                unit = self._owners.pop(storage, unit)
        left = self.held[unit, kind] = self.held[unit, kind] + nbytes
        if left == 0:
            del self.held[unit, kind]
        return unit

    def lane_times(self, begun: Any, ended: Any) -> tuple[float | None, float | None]:
        """Return when a lane got to an action, and how long it took."""
        start_s, end_s = self._clock.time_of(begun), self._clock.time_of(ended)
        if start_s is None or end_s is None:
            return None, None
        return start_s, end_s - start_s


class _Reader:
    """Puts the entries of one segment together."""

    def __init__(self, step: Step, history: History) -> None:
        self._step = step
        self._history = history
        self._open: list[tuple[Any, ...]] = []  # actions that have begun
        self._guessed: dict[int, int] = {}  # unit -> the one that was entered then
        self._trigger: Any = None
        self._entered = NO_UNIT

    def read(self, entries: Iterable[tuple[Any, ...]]) -> None:
        """Put ``entries`` into the step, in the order in which actions began."""
        read = (self._heard, self._acts, self._acted, self._held)
        for entry in entries:
            read[entry[0]](entry)
        self._step.acts.sort(key=_start)

    def _heard(self, entry: tuple[Any, ...]) -> None:
        _, at_s, trigger, base = entry
        self._trigger = trigger
        self._step.heard.append((at_s, trigger, base))
        if type(trigger) in _ENTERS:
            self._entered = base + trigger.unit
            self._guessed.pop(self._entered, None)
        else:
            self._entered = NO_UNIT

    def _acts(self, entry: tuple[Any, ...]) -> None:
        self._open.append(entry)
        _, _, action, base, _ = entry
        if action.unit is None:
            return
        unit = base + action.unit
        if action.op is Op.UNSHARD:
            if unit != self._entered:
                self._guessed[unit] = self._entered
        elif action.op in _ENDS_GATHER and unit in self._guessed:
            self._step.missed.append(Missed(unit, self._guessed.pop(unit), self._entered))

    def _acted(self, entry: tuple[Any, ...]) -> None:
        if not self._open:
            return  # it began in a segment that was cut
        _, at_s, action, base, begun = self._open.pop()
        unit = NO_UNIT if action.unit is None else base + action.unit
        lane = (None, None) if begun is None else self._history.lane_times(begun, entry[2])
        self._step.acts.append(Act(action.op, unit, at_s, entry[1] - at_s, *lane))

    def _held(self, entry: tuple[Any, ...]) -> None:
        _, at_s, kind, nbytes, storage = entry
        action, base = self._open[-1][2:4] if self._open else (None, 0)
        unit = NO_UNIT if action is None or action.unit is None else base + action.unit
        unit = self._history.changed(kind.value, nbytes, storage, unit)
        self._step.changes.append(Change(at_s, kind.value, nbytes, unit))


def _start(act: Act) -> float:
    return act.start_s
