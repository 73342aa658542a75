"""The error raised for a failed collective, and reports of a rank, with scripted rounds."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from fullshard.comm.fault_domain import Era, FaultDomain, fault_domain
from fullshard.comm.ledger import Entry, Ledger
from fullshard.errors import LostRankError, PeerError
from fullshard.watch import reporting
from fullshard.watch.diagnosis import NOTHING, UNDECIDED, Diagnosis, Kind
from fullshard.watch.status import StatusReport
from fullshard.watch.step import Failure, Step, verdict_pending
from fullshard.watch.watcher import Watcher

ENTRY: Entry = (3, "gather", "unit a", 8)


class Played:
    """A watch with a scripted diagnosis for each round."""

    is_over = False
    last = UNDECIDED

    def __init__(self, *rounds: Callable[[], Diagnosis]) -> None:
        self.rounds = list(rounds)

    def ask(self) -> None:
        self.last = self.rounds.pop(0)()


class OfEra:
    """A ledger with the attributes that ``explain`` reads."""

    def __init__(self) -> None:
        self.era, self.domain = Era(), FaultDomain()


def explained(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError, of: OfEra, watch: Played
) -> Exception:
    monkeypatch.setattr(reporting, "watcher", lambda: cast(Watcher, watch))
    return reporting.explain(error, cast(Ledger, cast(Any, of)), ENTRY)


def test_a_round_after_the_one_that_found_the_fault_does_not_hide_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another rank may trigger a further round, whose verdict is that nothing is wrong."""
    of = OfEra()

    def found_then_asked_again() -> Diagnosis:
        of.era.end(lambda: LostRankError("rank 1 ended"))
        return NOTHING

    watch = Played(found_then_asked_again)
    told = explained(monkeypatch, LostRankError("connection reset"), of, watch)
    assert isinstance(told, LostRankError) and str(told) == "rank 1 ended"
    assert not watch.rounds


def test_a_lost_connection_is_asked_about_until_somebody_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connection closes shortly before its process ends."""
    of = OfEra()

    def found() -> Diagnosis:
        of.era.end(lambda: LostRankError("rank 1 ended"))
        return NOTHING

    watch = Played(lambda: NOTHING, lambda: UNDECIDED, found)
    told = explained(monkeypatch, LostRankError("connection reset"), of, watch)
    assert str(told) == "rank 1 ended" and not watch.rounds


def test_another_error_is_raised_itself_if_nothing_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = RuntimeError("out of memory")
    watch = Played(lambda: UNDECIDED, lambda: NOTHING)
    assert explained(monkeypatch, error, OfEra(), watch) is error and not watch.rounds


def test_a_step_that_begins_forgets_failures_that_were_not_told() -> None:
    """Otherwise a later verdict would blame this rank for them. Half-stepped failures are kept."""
    failed, torn, next_one = Step(), Step(), Step()
    failed.begin()
    failed.end(ValueError("no"), failed=True)
    torn.failure = Failure("an exception", 0.0, is_half_stepped=True)
    next_one.begin()
    assert failed.failure is None
    assert torn.failure is not None
    next_one.end(failed=False)
    torn.failure = None
    fault_domain().has_unreported_failure = False


class Seen(Step):
    """A step that records the states which another thread could see."""

    __slots__ = ("states",)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if hasattr(self, "states"):
            self.states.append((self.is_open, self.failure is not None))


def test_a_failing_step_is_never_seen_as_one_that_ended_well() -> None:
    """The watch may read the step from its own thread at any time."""
    step = Seen()
    step.begin()
    step.states: list[tuple[bool, bool]] = []
    step.end(ValueError("no"), failed=True)
    assert (False, False) not in step.states and step.states[-1] == (False, True)
    step.failure = None
    fault_domain().has_unreported_failure = False


class PlayedRounds:
    """The rounds of one rank, with a fixed verdict."""

    def __init__(self, found: Diagnosis) -> None:
        self.reports: list[StatusReport] = []
        self.found = found

    def report(self, number: int, own: StatusReport) -> None:
        self.reports.append(own)

    def verdict(self, number: int) -> Diagnosis:
        return self.found


def take_part(found: Diagnosis = NOTHING) -> StatusReport:
    """Take part in one round; return the report of this rank."""
    watch: Any = object.__new__(Watcher)
    watch.rank, watch.world, watch.failure, watch.last, watch.fault = 0, 2, None, NOTHING, ""
    watch._rounds, watch._domain = PlayedRounds(found), fault_domain()
    watch._take_part(1)
    report: StatusReport = watch._rounds.reports[0]
    return report


def test_a_failure_during_a_round_is_told_or_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it were reported and kept, the next round would blame this rank for the same error."""
    step = Step()
    for moment in range(1, 5):
        looks = itertools.count(1)
        step.begin()

        def fails(moment: int = moment, looks: Iterator[int] = looks) -> list[Step]:
            if next(looks) == moment:
                step.end(ValueError("no"), failed=True)
            return [step]

        monkeypatch.setattr(sys.modules[Watcher.__module__], "steps", fails)
        is_told = bool(take_part().failure)
        has_failed = not step.is_open
        assert is_told == (has_failed and step.failure is None)
        if not has_failed:
            step.end(failed=False)
    fault_domain().has_unreported_failure = False


def test_a_failure_in_a_step_that_all_ranks_dropped_is_not_told() -> None:
    """This rank failed before it learned that another rank's fault had ended the step."""
    step = Step()
    step.begin()
    step.end(ValueError("no"), failed=True)
    step.era = Era()
    step.era.end(lambda: LostRankError("rank 1 ended"))
    assert not take_part().failure and step.failure is None
    fault_domain().has_unreported_failure = False


def test_a_round_that_did_not_wait_for_this_rank_leaves_its_failures() -> None:
    """The verdict came without this rank's report, so no rank has read its failures."""
    step = Step()
    step.begin()
    step.end(ValueError("no"), failed=True)
    take_part(NOTHING._replace(silent=(0,)))
    assert step.failure is not None
    take_part(NOTHING._replace(silent=(1,)))
    assert step.failure is None
    fault_domain().has_unreported_failure = False


@pytest.mark.parametrize("is_open", [True, False])
def test_a_fault_found_without_this_rank_ends_its_next_step(is_open: bool) -> None:
    """Or its current step. Such a verdict cannot list this rank as behind."""
    step, fault = Step(), Diagnosis(Kind.FAILED, (1,), "rank 1 failed", (), (0,))
    if is_open:
        step.begin()
    take_part(fault)
    with pytest.raises(PeerError, match="rank 1 failed"):
        step.check() if is_open else step.begin()
    step.end(failed=False)
    step.begin()
    step.end(failed=False)


def test_steps_that_nobody_goes_on_with_are_not_open() -> None:
    """A variable may keep a model and its output alive on this rank only."""
    trains, left, elsewhere = Step(), Step(), Step()
    for step in (left, elsewhere):
        step.begin()
    elsewhere.domain = FaultDomain()  # an earlier job of this process
    assert take_part().is_open
    for _ in range(2):
        trains.begin()
        trains.end(failed=False, trained=True)
    assert elsewhere.is_open and left.is_open and not take_part().is_open
    left.begin()
    assert take_part().is_open
    for step in (left, elsewhere):
        step.end(failed=False)


def test_a_fault_is_raised_once_in_the_thread_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank between two steps gets the error in its wait, or when the next step begins."""
    of, step = OfEra(), Step()
    monkeypatch.setattr(reporting, "watcher", lambda: None)
    monkeypatch.setattr("fullshard.watch.step.fault_domain", lambda: of.domain)
    step.begin()
    step.end(failed=False)
    for is_other in (True, False):
        of.era = of.domain.era
        of.domain.end_era(lambda: PeerError("rank 1 failed"), is_behind=True)
        raised: list[Exception] = []

        def wait(raised: list[Exception] = raised) -> None:
            error = RuntimeError("broken")
            raised.append(reporting.explain(error, cast(Ledger, cast(Any, of)), ENTRY))

        thread = threading.Thread(target=wait)
        if is_other:
            thread.start()
            thread.join()
            with pytest.raises(PeerError):
                step.begin()
        else:
            wait()
            step.begin()
        assert isinstance(raised[0], PeerError)
        step.end(failed=False)


def test_no_step_ends_between_report_and_verdict() -> None:
    """Otherwise other ranks would believe that this rank is inside the step."""
    step = Step()
    step.begin()
    thread = threading.Thread(target=lambda: step.end(failed=False))
    with verdict_pending:
        thread.start()
        thread.join(0.2)
        assert step.is_open and thread.is_alive()
    thread.join(10.0)
    assert not step.is_open
