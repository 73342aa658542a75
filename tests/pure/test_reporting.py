"""What is raised for a collective that failed, with a watch that a test plays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from fullshard.comm import ledger
from fullshard.comm.ledger import Entry, Era, Ledger
from fullshard.errors import LostRankError
from fullshard.watch import reporting
from fullshard.watch.diagnosis import NOTHING, UNDECIDED, Diagnosis
from fullshard.watch.step import Failure, Step
from fullshard.watch.watcher import Watcher

ENTRY: Entry = (3, "gather", "unit a", 8)


class Played:
    """A watch whose rounds find what ``rounds`` return, one after the other."""

    is_over = False
    last = UNDECIDED

    def __init__(self, *rounds: Callable[[], Diagnosis]) -> None:
        self.rounds = list(rounds)

    def ask(self) -> None:
        self.last = self.rounds.pop(0)()


class OfEra:
    """The part of a ledger that is asked for."""

    def __init__(self) -> None:
        self.era = Era()


def explained(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError, of: OfEra, watch: Played
) -> Exception:
    monkeypatch.setattr(reporting, "watcher", lambda: cast(Watcher, watch))
    return reporting.explain(error, cast(Ledger, cast(Any, of)), ENTRY)


def test_a_round_after_the_one_that_found_the_fault_does_not_hide_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another rank asks, too; once all know of the fault, nothing is wrong any more."""
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
    """Connections close a moment before their process ends."""
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
    """Of models that are gone, too: a later verdict would name this rank for them."""
    failed, torn, next_one = Step(), Step(), Step()
    failed.begin()
    failed.end(ValueError("no"), failed=True)
    torn.failure = Failure("an exception", 0.0, is_half_stepped=True)
    next_one.begin()
    assert failed.failure is None
    assert torn.failure is not None
    next_one.end(failed=False)
    torn.failure = None
    ledger.unsettled = False
