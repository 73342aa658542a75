"""Turn the entries of a step into actions with times, work of the model and buffer changes.

This code runs after the end of a trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from fullshard.schedule.triggers import (
    NO_TASK,
    BackwardEnter,
    ForwardEnter,
    ForwardExit,
    TaskDied,
    TaskEnd,
)
from fullshard.trace.steps import (
    ACTED,
    ACTS,
    HEARD,
    HELD,
    NO_UNIT,
    KeptSegment,
    TapeSegment,
    lane_time,
)


class Act(NamedTuple):
    """An action: its unit, by number in the tree, and its times."""

    op: str
    unit: int
    start_s: float
    host_s: float
    """Seconds of the host."""
    lane_start_s: float | None = None
    """Time at which its lane started it; None if unknown, or if the action has no lane."""
    lane_s: float | None = None


class Work(NamedTuple):
    """A forward, a recompute or a backward of a unit, as the host issued it."""

    what: str
    unit: int
    start_s: float
    took_s: float


class Change(NamedTuple):
    """A change in the size of a buffer."""

    at_s: float
    kind: str
    nbytes: int
    unit: int
    """The unit of the action; NO_UNIT outside of any."""
    storage: int | None
    """The id of its storage."""


def acts(kept: KeptSegment) -> Iterator[Act]:
    """Yield the actions of a segment, in order of their end."""
    began: list[tuple[Any, ...]] = []
    for entry in kept.segment.entries:
        if entry[0] == ACTS:
            began.append(entry)
        elif entry[0] == ACTED and began:
            _, at_s, action, base, stamp = began.pop()
            lane = lane_time(kept.clock, stamp, entry[2])
            yield Act(action.op.value, _unit(action, base), at_s, entry[1] - at_s, *lane)


def works(entries: Iterable[tuple[Any, ...]]) -> Iterator[Work]:
    """Yield the model's work; a unit's backward lasts until the next unit's backward."""
    forwards: list[Work] = []
    backward: Work | None = None
    for entry in entries:
        if entry[0] != HEARD:
            continue
        _, at_s, trigger, base = entry
        kind = type(trigger)
        if kind is ForwardEnter:
            what = "forward" if trigger.task == NO_TASK else "recompute"
            forwards.append(Work(what, base + trigger.unit, at_s, 0.0))
        elif kind is ForwardExit:
            yield from _left(forwards, base + trigger.unit, at_s)
        elif kind in (BackwardEnter, TaskEnd, TaskDied):
            if backward is not None:
                yield backward._replace(took_s=at_s - backward.start_s)
            enters = kind is BackwardEnter
            backward = Work("backward", base + trigger.unit, at_s, 0.0) if enters else None


def _left(forwards: list[Work], unit: int, at_s: float) -> Iterator[Work]:
    """Close the forward of ``unit``, and forwards inside it that an exception ended."""
    if not any(one.unit == unit for one in forwards):
        return
    while forwards:
        one = forwards.pop()
        yield one._replace(took_s=at_s - one.start_s)
        if one.unit == unit:
            return


def changes(entries: Iterable[tuple[Any, ...]]) -> Iterator[Change]:
    """Yield the changes of buffers."""
    began: list[int] = []
    for entry in entries:
        if entry[0] == ACTS:
            began.append(_unit(entry[2], entry[3]))
        elif entry[0] == ACTED and began:
            began.pop()
        elif entry[0] == HELD:
            _, at_s, kind, nbytes, storage = entry
            yield Change(at_s, kind.value, nbytes, began[-1] if began else NO_UNIT, storage)


def held_when_it_failed(
    steps: Iterable[KeptSegment], last: KeptSegment
) -> tuple[int, dict[tuple[int, str], int]]:
    """Return the unit that ran last before the exception in ``last``, and the memory held then.

    The memory is counted by unit and kind.

    Forwards and backwards free their memory as the exception passes through them, before a trace
    sees it. So only entries before the first trigger that reports the exception count. The unit of
    a buffer is known if the buffer was made in ``steps`` or in ``last``.
    """
    unit, failed_s = _failure(last.segment)
    held: Counter[tuple[int, str]] = Counter()
    owners: dict[int, int] = {}
    in_all = Counter(last.segment.held)
    for one in (*(step for step in steps if step is not last), last):
        for change in changes(one.segment.entries):
            owner = change.unit
            if change.at_s >= failed_s:
                in_all[change.kind] -= change.nbytes
                continue
            if change.storage is not None and change.nbytes > 0:
                owners[change.storage] = owner
            elif change.storage is not None:
                owner = owners.pop(change.storage, NO_UNIT)
            if owner != NO_UNIT:
                held[owner, change.kind] += change.nbytes
    rest = {
        (NO_UNIT, kind): nbytes - sum(n for (_, its), n in held.items() if its == kind)
        for kind, nbytes in in_all.items()
    }
    return unit, {key: nbytes for key, nbytes in {**held, **rest}.items() if nbytes > 0}


def _failure(segment: TapeSegment) -> tuple[int, float]:
    """Return the last unit before the exception, and the time of the trigger that reports it."""
    unit = NO_UNIT
    for entry in segment.entries:
        if entry[0] == HEARD:
            _, at_s, trigger, base = entry
            if isinstance(trigger, TaskDied) or getattr(trigger, "failed", False):
                return unit, at_s
            if isinstance(trigger, (ForwardEnter, BackwardEnter)):
                unit = base + trigger.unit
    return unit, segment.end_s


def _unit(action: Any, base: int) -> int:
    return NO_UNIT if action.unit is None else base + int(action.unit)
