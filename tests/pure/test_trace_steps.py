"""Recording the steps of a trace: the kept steps, and where steps end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.device import BufferKind
from fullshard.device.streams import Reading
from fullshard.schedule import Action, Event, Op
from fullshard.schedule import triggers as when
from fullshard.schedule.triggers import Follows
from fullshard.trace import steps as kept
from fullshard.trace.reading import acts, held_when_it_failed
from fullshard.trace.steps import (
    ACTED,
    ACTS,
    HEARD,
    HELD,
    NO_UNIT,
    Clock,
    History,
    Missed,
    TapeSegment,
)
from fullshard.trace.steps import SegmentKind as Kinds
from fullshard.trace.tape import Tap, Tape

NO_CLOCK = Clock(0.0, None)


def acted(op: Op, unit: int, start_s: float, took_s: float, *stamps: Any) -> list[tuple[Any, ...]]:
    begun, ended = stamps or (None, None)
    return [(ACTS, start_s, Action(op, unit), 0, begun), (ACTED, start_s + took_s, ended)]


def segment(*parts: list[tuple[Any, ...]], start_s: float = 0.0, end_s: float = 1.0) -> TapeSegment:
    return TapeSegment(Kinds.STEP, start_s, end_s, [entry for part in parts for entry in part], {})


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(1, 5)), max_size=60), st.integers(1, 8))
def test_sums_are_of_all_steps_but_the_first_and_few_are_kept(
    waits: list[tuple[float, int]], keep: int
) -> None:
    history = History(keep, 1, NO_CLOCK)
    for took_s, times in waits:
        history.add(segment(*[acted(Op.WAIT, 0, 0.0, took_s)] * times, end_s=took_s))
    history.end()
    total, counted = history.units[0].gather, waits[1:] or waits
    assert history.first_s == (waits[0][0] if len(waits) > 1 else None)
    assert history.spent[Kinds.STEP].count == len(counted)
    assert total.count == sum(times for _, times in counted)
    assert total.total_s == pytest.approx(sum(took_s * times for took_s, times in counted))
    assert total.most_s == max((took_s for took_s, _ in counted), default=0.0)
    numbers = [one.number for one in history.kept]
    assert len(numbers) <= keep + kept.NUM_SLOWEST
    assert numbers[-keep:] == list(range(1, len(waits) + 1))[-keep:]
    if waits:
        slowest = max(took_s for took_s, _ in waits)
        assert slowest in {one.segment.end_s for one in history.kept}


def test_few_steps_are_kept_of_very_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_KEPT", 100)
    history = History(20, 1, NO_CLOCK)
    for number in range(50):
        history.add(segment(acted(Op.WAIT, 0, 0.0, 1.0) * 15, end_s=50.0 - number))
    assert [one.number for one in history.kept] == [1, 2, 3, 48, 49, 50]


def heard(trigger: Any, at_s: float = 0.0) -> list[tuple[Any, ...]]:
    return [(HEARD, at_s, trigger, 0)]


def test_a_guess_misses_if_its_unit_is_resharded_before_it_came() -> None:
    history = History(5, 3, NO_CLOCK)
    enter = [heard(when.ForwardEnter(unit)) for unit in range(3)]
    guessed = [acted(Op.UNSHARD, unit, 0.0, 0.0) for unit in range(3)]
    dropped = [acted(Op.FINISH_GATHER, 1, 0.0, 0.0), acted(Op.RESHARD, 1, 0.0, 0.0)]
    history.add(segment(enter[0], guessed[0], guessed[1], enter[2], *dropped, guessed[2]))
    history.add(segment(enter[0], guessed[0], guessed[1], enter[1], *dropped))
    end = heard(when.TaskEnd(0))
    history.add(segment(enter[0], guessed[1], end, *dropped))
    assert dict(history.missed) == {Missed(1, 0, 2): 1, Missed(1, 0, NO_UNIT): 1}
    assert [one.missed for one in history.kept] == [
        [Missed(1, 0, 2)],
        [],
        [Missed(1, 0, NO_UNIT)],
    ]


def test_sums_leave_out_evaluations() -> None:
    history = History(5, 2, NO_CLOCK)
    step = segment(heard(when.ForwardEnter(0)), acted(Op.UNSHARD, 1, 0.0, 0.0))
    step.entries.extend(acted(Op.WAIT, 1, 0.0, 1.0))
    missed = segment(step.entries, acted(Op.RESHARD, 1, 0.0, 0.0))
    for one in (step, step, missed._replace(kind=Kinds.EVALUATION), step):
        history.add(one)
    history.end()
    assert history.spent[Kinds.EVALUATION].count == 1
    assert (history.units[1].gathers, history.units[1].gather.total_s) == (2, 2.0)
    assert not history.missed


def test_times_of_lanes_count_where_they_are_known() -> None:
    history = History(5, 1, Clock(100.0, Reading(7.0)))
    history.add(segment(acted(Op.WAIT, 0, 0.0, 0.001, Reading(8.0), Reading(8.5))))
    assert history.units[0].gather.total_s == pytest.approx(0.5)
    (one,) = history.kept
    (act,) = acts(one)
    assert (act.lane_start_s, act.lane_s, act.host_s) == (101.0, 0.5, 0.001)


class Later:
    """A time stamp that the device has not reached at first."""

    there = False

    def seconds_since(self, earlier: Any) -> float | None:
        return 0.25 if self.there else None


def test_segments_wait_for_their_device_but_not_for_ever() -> None:
    history = History(20, 1, Clock(0.0, Later()))
    stamp = Later()
    one = segment(acted(Op.WAIT, 0, 0.0, 0.001, stamp, stamp))
    history.add(one)
    assert history.kept == []
    for _ in range(9):
        history.add(one)
    assert len(history.kept) == 6
    stamp.there = True
    history.end()
    assert len(history.kept) == 10 and history.units[0].gather.count == 9


def test_what_was_held_when_it_failed_is_told_by_unit() -> None:
    history = History(5, 3, NO_CLOCK)

    def grown(nbytes: int, storage: int, at_s: float) -> list[tuple[Any, ...]]:
        begin, end = acted(Op.UNSHARD, storage, at_s, 0.0)
        return [begin, (HELD, at_s, BufferKind.UNSHARDED, nbytes, storage), end]

    history.add(segment(grown(10, 0, 0.1), grown(20, 1, 0.2))._replace(held={"unsharded": 35}))
    entries = segment(
        heard(when.ForwardEnter(2), 0.3),
        grown(-10, 0, 0.4),
        grown(40, 2, 0.5),
        heard(when.ForwardExit(2, failed=True), 0.6),
        grown(-40, 2, 0.7),
    )
    history.add(entries._replace(kind=Kinds.PART, held={"unsharded": 25}))
    assert history.last is not None
    unit, held = held_when_it_failed(history.kept, history.last)
    assert unit == 2
    assert held == {(1, "unsharded"): 20, (2, "unsharded"): 40, (NO_UNIT, "unsharded"): 5}


# Ends of steps.


class Heard:
    """Sends triggers to a tape, one a second."""

    def __init__(self) -> None:
        self.segments: list[tuple[Kinds, float]] = []
        self.tape = Tape(lambda one: self.segments.append((one.kind, one.end_s)), 0.0)
        self.at_s = 0.0

    def forward(self, follows: Follows = Follows.BACKWARD) -> Heard:
        return self.hear(when.ForwardEnter(0), 1).hear(when.ForwardExit(0, follows=follows), 0)

    def backward(self) -> Heard:
        return self.hear(when.TaskEnd(0), 0)

    def changed(self) -> Heard:
        return self.hear(when.WeightsChanged(), 0)

    def hear(self, trigger: Any, depth: int) -> Heard:
        self.at_s += 1.0
        self.tape.heard(trigger, depth, self.at_s)
        self.tape.entries.append((HEARD, self.at_s, trigger, 0))
        return self

    def end(self) -> list[tuple[Kinds, float]]:
        self.tape.end()
        return self.segments[:-1]  # without the rest, a part of a step


def test_a_step_ends_with_its_last_optimizer() -> None:
    heard = Heard().forward().backward().changed().changed()
    assert heard.forward().backward().changed().end() == [(Kinds.STEP, 5.0), (Kinds.STEP, 9.0)]


def test_gradients_are_accumulated_within_a_step() -> None:
    heard = Heard().changed()  # weights were loaded
    heard.forward().backward().forward().backward().changed()
    assert heard.forward().end() == [(Kinds.STEP, 8.0)]


def test_evaluation_between_steps_is_apart() -> None:
    heard = Heard().forward().backward().changed()
    heard.forward(Follows.NOTHING).forward(Follows.NOTHING).forward().backward().changed()
    kinds = [Kinds.STEP, Kinds.EVALUATION, Kinds.EVALUATION, Kinds.STEP]
    assert [kind for kind, _ in heard.end()] == kinds


def test_a_forward_without_gradients_between_microbatches_is_part_of_the_step() -> None:
    heard = Heard().forward().backward().forward(Follows.NOTHING).forward().backward().changed()
    assert heard.end() == [(Kinds.STEP, 9.0)]


def test_an_optimizer_that_steps_in_backward_ends_the_step_with_it() -> None:
    heard = Heard()
    for _ in range(2):
        heard.forward().changed().changed().backward()
    assert heard.forward().end() == [(Kinds.STEP, 5.0), (Kinds.STEP, 10.0)]


def test_a_loop_that_never_steps_is_cut() -> None:
    heard = Heard()
    for _ in range(3):
        heard.forward().backward()
        heard.tape.cut(heard.at_s)
    heard.changed().forward().backward().changed()
    kinds = [kind for kind, _ in heard.end()]
    assert kinds == [Kinds.PART] * 4 + [Kinds.STEP]  # the rest of a cut step is no step


def test_on_a_device_actions_are_stamped_on_their_lanes() -> None:
    stamped: list[str] = []
    lanes = SimpleNamespace(stamp=lambda lane: stamped.append(lane) or Reading(0.0))
    engine: Any = SimpleNamespace(
        is_dry=False,
        units=[SimpleNamespace(device=SimpleNamespace(type="cuda"))],
        lanes=lanes,
        recorder=None,
        observer=None,
        meter=SimpleNamespace(watch=None),
        scheduler=SimpleNamespace(depth=0),
    )
    tape = Tape(lambda one: None, 0.0)
    tap = Tap(engine, 0, tape)
    tap.attach()
    tap.record(Event(when.GradsReady(0, 0), ()))
    with tap.acting(Action(Op.UNSHARD, 0)):
        with tap.acting(Action(Op.RESHARD, 0)):
            pass
        tap.resized(BufferKind.UNSHARDED, 5, None)
    with tap.acting(Action(Op.FINISH_REDUCE, 0)):
        pass
    tap.detach()
    assert stamped == ["gather", "gather", "compute", "compute"]
    codes = [HEARD, ACTS, ACTS, ACTED, HELD, ACTED, ACTS, ACTED]
    assert [entry[0] for entry in tape.entries] == codes
    assert (engine.recorder, engine.observer, engine.meter.watch) == (None, None, None)


def test_guesses_that_an_exception_ended_were_not_wrong() -> None:
    history = History(5, 2, NO_CLOCK)
    began = [heard(when.ForwardEnter(0)), acted(Op.UNSHARD, 1, 0.0, 0.0)]
    dropped = [acted(Op.FINISH_GATHER, 1, 0.0, 0.0), acted(Op.RESHARD, 1, 0.0, 0.0)]
    for trigger in (when.ForwardExit(0, failed=True), when.TaskDied(0)):
        history.add(segment(*began, heard(trigger), *dropped))
    assert not history.missed
