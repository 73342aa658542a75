"""The diagnosis, as a function of the reports of all ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fullshard.comm.fault_domain import FaultDomain
from fullshard.comm.liveness import DEAD, STOPPED, Liveness, NoReport
from fullshard.errors import FullshardError, PeerError, ProtocolError
from fullshard.watch import step as steps
from fullshard.watch.diagnosis import Diagnosis, Kind, diagnose
from fullshard.watch.rounds import Rounds
from fullshard.watch.status import GroupStatus, Issued, StatusReport
from fullshard.watch.step import Step

PATIENCE_S = 5.0
ORDER = ("a", "b", "c", "b", "a")


def issued(number: int, unit: str) -> Issued:
    return Issued(number, "gather", f"unit {unit} (weight; digest 1)", 8)


def report(
    rank: int,
    units: tuple[str, ...],
    *,
    world: int = 3,
    waits_s: float | None = None,
    is_open: bool = True,
    failure: str = "",
    failed_s: float = 0.0,
    stack: str = "",
) -> StatusReport:
    """Return the report of a rank that issued a gather of each unit, and may wait for the last."""
    recent = tuple(issued(number, unit) for number, unit in enumerate(units))
    waiting = None if waits_s is None else len(units) - 1
    group = GroupStatus("0", tuple(range(world)), len(units), recent, waiting, waits_s or 0.0)
    return StatusReport(rank, (group,), is_open, failure, failed_s, stack)


def saving(waited_s: float, *, world: int = 3) -> GroupStatus:
    """Return the group status of a rank that waits for others in a save."""
    save = Issued(2, "save", "a checkpoint", 0)
    return GroupStatus("decisions", tuple(range(world)), 3, (save,), 2, waited_s)


def found(*said: StatusReport, absent: Mapping[int, NoReport] | None = None) -> Diagnosis:
    return diagnose({one.rank: one for one in said}, absent or {}, patience_s=PATIENCE_S)


def test_status_reports_come_back_from_json() -> None:
    one = report(2, ("a", "b"), waits_s=1.5, failure="E: no", stack="f (x.py:3)")
    assert StatusReport.decoded(one.encoded()) == one


def test_what_differs_first_is_told() -> None:
    what = found(
        report(0, ("a", "b", "c"), waits_s=0.1),
        report(1, ("a", "c", "b"), stack="load (x.py:3)"),
        report(2, ("a", "b", "c")),
    )
    assert (what.kind, what.ranks) == (Kind.APART, (1,))
    assert "collective 1 of the group of ranks 0, 1, 2 is the gather of unit b on" in what.text
    assert "ranks 0, 2, and the gather of unit c on rank 1" in what.text
    assert "rank 1 is at load (x.py:3)" in what.text


def test_who_failed_while_others_wait_is_told() -> None:
    what = found(
        report(0, ("a", "b"), waits_s=0.1),
        report(1, ("a",), is_open=False, failure="ValueError: no, in the forward of unit a"),
        report(2, ("a", "b"), waits_s=0.1),
    )
    assert (what.kind, what.ranks) == (Kind.FAILED, (1,))
    assert what.text.startswith("rank 1 failed: ValueError: no, in the forward of unit a; rank 0")


def test_who_failed_is_waited_for_until_others_wait_or_fail_likewise() -> None:
    failed = report(1, ("a",), is_open=False, failure="E", failed_s=0.1)
    alike = failed._replace(rank=0), failed._replace(rank=2)
    assert found(failed, report(0, ("a",)), report(2, ("a",))).kind is Kind.UNDECIDED
    assert found(failed, *alike).kind is Kind.NOTHING
    late = failed._replace(failed_s=PATIENCE_S + 1)
    assert found(late, report(0, ("a",)), report(2, ("a",))).kind is Kind.FAILED
    assert found(late, *(one._replace(failed_s=PATIENCE_S + 1) for one in alike)).kind is (
        Kind.NOTHING
    )


def test_who_failed_before_others_began_is_waited_for_then_they_leave_the_step_out() -> None:
    failed = report(1, ("a",), is_open=False, failure="E", failed_s=0.1)
    idle = report(0, ("a",), is_open=False), report(2, ("a",), is_open=False)
    assert found(failed, *idle).kind is Kind.UNDECIDED
    assert found(failed, failed._replace(rank=0), idle[1]).kind is Kind.UNDECIDED
    what = found(failed._replace(failed_s=PATIENCE_S + 1), *idle)
    assert (what.kind, what.ranks, what.behind) == (Kind.FAILED, (1,), (0, 2))
    # A rank that ends its program publishes the reason.
    last = failed._replace(ends_program=True)
    assert found(last, *idle).kind is Kind.NOTHING
    assert found(last, report(0, ("a",)), idle[1]).kind is Kind.UNDECIDED
    assert found(last, failed._replace(rank=0), idle[1]).kind is Kind.UNDECIDED


def ended(one: StatusReport, num_ended: int) -> StatusReport:
    """Return a report with a last good step that ended after ``num_ended`` collectives."""
    return one._replace(groups=tuple(its._replace(num_ended=num_ended) for its in one.groups))


def test_who_failed_in_a_step_that_others_ended_is_told() -> None:
    why = "ValueError: no, in the backward of unit a"
    failed = ended(report(1, ("a", "b"), is_open=False, failure=why, failed_s=0.1), 0)
    late = failed._replace(failed_s=PATIENCE_S + 1)
    next_step = ended(report(0, ("a", "b", "a"), waits_s=0.1), 2)
    between = ended(report(2, ("a", "b"), is_open=False), 2)
    what = found(next_step, failed, between)
    assert (what.kind, what.ranks, what.behind) == (Kind.HALF_STEPPED, (1,), (1, 2))
    assert what.text == (
        f"rank 1 failed: {why}, in a step that ranks 0, 2 had already ended: only some ranks have "
        "its gradients. Load a checkpoint on all ranks"
    )
    # No rank has begun the next step, so the others may be about to step their weights, or to clip.
    assert found(between._replace(rank=0), failed, between).kind is Kind.UNDECIDED
    assert found(between._replace(rank=0), late, between).kind is Kind.HALF_STEPPED
    # Rank 0 waits for a norm to clip by, and will drop the step.
    clips = ended(report(0, ("a", "b", "norm"), waits_s=0.1, is_open=False), 2)
    assert found(clips, failed, between).kind is Kind.FAILED
    # Rank 0 waits in a save, before which weights may have been stepped.
    saves = between._replace(rank=0, groups=(*between.groups, saving(0.1)))
    assert found(saves, failed, between).kind is Kind.UNDECIDED
    assert found(saves, late, between).kind is Kind.HALF_STEPPED
    # The others are still in that step; or the failed rank had ended it, too.
    inside = ended(report(0, ("a", "b"), waits_s=0.1), 0), ended(report(2, ("a", "b")), 0)
    assert found(inside[0], failed, inside[1]).kind is Kind.UNDECIDED
    assert found(next_step, ended(failed, 2), between).kind is Kind.FAILED
    assert found(next_step, ended(failed, 2), between).behind == (2,)


def test_an_optimizer_that_was_left_in_its_step_is_told_at_once() -> None:
    why = "an exception, in the step of AdamW"
    left = report(1, ("a", "b"), is_open=False, failure=why)._replace(is_half_stepped=True)
    assert StatusReport.decoded(left.encoded()) == left
    waits, between = report(0, ("a", "b", "a"), waits_s=0.1), report(2, ("a",), is_open=False)
    what = found(waits, left, between)
    assert (what.kind, what.ranks, what.behind) == (Kind.HALF_STEPPED, (1,), (1, 2))
    assert what.text == (
        f"rank 1 failed: {why}, so the weights there are half-stepped. "
        "Load a checkpoint on all ranks"
    )
    # All ranks are half-stepped, so nobody knows whether their weights are alike.
    assert found(left._replace(rank=0), left, left._replace(rank=2)).ranks == (0, 1, 2)
    # Half-stepped weights may make ranks run different units. A lost rank is named first.
    assert found(report(0, ("a", "c")), left, waits._replace(rank=2)).kind is Kind.HALF_STEPPED
    gone = {2: NoReport(DEAD, True)}
    assert found(waits, left, absent=gone).kind is Kind.LOST
    other = left._replace(groups=())  # another training job
    assert found(report(0, ("a",), is_open=False), other).behind == (1,)


def test_a_wait_for_what_all_have_issued_is_not_in_vain() -> None:
    failed = report(1, ("a", "b"), is_open=False, failure="E", failed_s=0.1)
    others = report(0, ("a", "b"), waits_s=9.0), report(2, ("a", "b"), waits_s=9.0)
    assert found(failed, *others).kind is Kind.UNDECIDED
    assert found(report(1, ("a", "b", "c"), waits_s=9.0), *others).kind is Kind.NOTHING


def test_who_is_late_is_told_after_the_patience() -> None:
    late = report(1, ("a",), stack="load (x.py:3)")
    early = report(0, ("a", "b"), waits_s=1.0), report(2, ("a", "b"), waits_s=1.0)
    assert found(late, *early).kind is Kind.NOTHING
    waiting = report(0, ("a", "b"), waits_s=6.0), report(2, ("a", "b"), waits_s=6.0)
    what = found(late, *waiting)
    assert (what.kind, what.ranks, what.is_fault) == (Kind.LATE, (1,), False)
    assert (
        "rank 1 has not reached this collective (its last: the gather of unit a), and is at load"
        in what.text
    )


@pytest.mark.parametrize(("is_final", "kind"), [(True, Kind.LOST), (False, Kind.LATE)])
def test_who_is_absent_is_told(is_final: bool, kind: Kind) -> None:
    waiting = report(0, ("a", "b"), waits_s=6.0), report(2, ("a", "b"), waits_s=6.0)
    what = found(*waiting, absent={1: NoReport("was stopped by a signal", is_final)})
    assert (what.kind, what.ranks) == (kind, (1,))
    assert what.text.startswith("rank 1 was stopped by a signal; rank 0 has waited 6.0 s for")


def test_a_rank_that_ended_with_the_error_of_a_loss_is_not_accused() -> None:
    gone = {
        1: NoReport("ended without a word: killed", is_final=True),
        2: NoReport("exited with LostRankError: rank 1 ended without a word: killed; rank 0", True),
    }
    running = report(0, ("a", "b")), report(3, ("a", "b"))
    assert found(*running, absent=gone).ranks == (1,)
    gone[2] = NoReport("exited with ValueError: no", is_final=True)
    assert found(*running, absent=gone).ranks == (1, 2)


def test_the_error_of_an_abort_is_no_failure_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    domain = FaultDomain()
    monkeypatch.setattr(steps, "fault_domain", lambda: domain)
    monkeypatch.setattr(steps, "_failed", set())
    step = Step(domain=domain, era=domain.era)
    domain.aborted_by = lambda: PeerError("rank 1 failed: no")
    refusals = []
    for _ in range(2):
        with pytest.raises(FullshardError) as caught:
            domain.refuse_aborted()
        refusals.append(caught.value)
    for error in (*refusals, ValueError("of this rank")):
        step.end(error, failed=True)
        assert (step.failure is None) == (error in refusals)
    with pytest.raises(ProtocolError, match="continue in new process groups"):
        step.begin()  # others would count a rank that waits in vain as lost
    assert not step.is_open


def test_a_rank_that_may_be_cut_off_from_the_store_alone_is_missed_before_it_is_lost() -> None:
    """The rank may still take part in collectives, until all others have waited long enough."""
    silent = {1: NoReport("has no heartbeat", is_final=True, least_wait_s=30.0)}

    def what(waits_s: float, third: StatusReport, *, is_open: bool = True) -> Kind:
        first = report(0, ("a", "b"), waits_s=waits_s, is_open=is_open)
        return found(first, third, absent=silent).kind

    assert what(29.0, report(2, ("a", "b"), waits_s=29.0)) is Kind.LATE
    assert what(31.0, report(2, ("a",))) is Kind.LATE  # rank 2 is late, and rank 1 may wait for it
    assert what(31.0, report(2, ("a", "b"), waits_s=31.0)) is Kind.LOST
    running = report(0, ("a", "b")), report(2, ("a", "b"))
    assert found(*running, absent=silent).kind is Kind.NOTHING
    assert found(*running, absent={1: NoReport("ended", is_final=True)}).kind is Kind.LOST


def test_whom_nobody_needs_may_end() -> None:
    rest = report(0, ("a", "b"), is_open=False), report(2, ("a", "b"), is_open=False)
    assert found(*rest, absent={1: NoReport("exited", True)}).kind is Kind.NOTHING


def test_ranks_that_wait_for_each_other_in_different_groups() -> None:
    def one(rank: int, first: str, second: str) -> StatusReport:
        waits = GroupStatus(first, (0, 1), 1, (issued(0, "a"),), 0, 6.0)
        return StatusReport(
            rank, (waits, GroupStatus(second, (0, 1), 0, (), None, 0.0)), True, "", 0.0, ""
        )

    what = found(one(0, "x", "y"), one(1, "y", "x"))
    assert (what.kind, what.ranks) == (Kind.APART, (0, 1))
    assert "ranks wait for each other" in what.text


def test_who_has_not_begun_the_step_that_is_dropped_is_known() -> None:
    waiting = report(0, ("a", "b"), waits_s=0.1)
    failed = report(1, ("a",), is_open=False, failure="E")
    loading = report(2, (), is_open=False)
    assert found(waiting, failed, loading).behind == (2,)
    assert found(waiting, failed, report(2, ("a",), is_open=False)).behind == (2,)
    assert found(waiting, failed, report(2, (), is_open=True)).behind == ()  # rank 2 is in the step
    ended = report(2, ("a", "b"), is_open=False)
    assert found(waiting, failed, ended).behind == ()  # issued more than the failed rank
    clips = report(2, ("a",), is_open=False, waits_s=0.1)  # this wait may end before the verdict
    assert found(waiting, failed, clips).behind == (2,)
    assert found(report(0, ("a",)), failed._replace(failed_s=0.1), loading).behind == ()


def test_who_has_not_begun_the_step_may_be_of_another_replica() -> None:
    def one(rank: int, count: int, *, is_open: bool, failure: str = "") -> StatusReport:
        shards = GroupStatus("s", (rank // 2 * 2, rank // 2 * 2 + 1), count, (), None, 0.0)
        replicas = GroupStatus("r", (rank % 2, rank % 2 + 2), 0, (), None, 0.0)
        return StatusReport(rank, (shards, replicas), is_open, failure, 9.0, "")

    said = one(0, 2, is_open=True), one(1, 1, is_open=False, failure="E")
    assert found(*said, one(2, 0, is_open=False), one(3, 0, is_open=False)).behind == (2, 3)
    assert found(*said, one(2, 1, is_open=True), one(3, 0, is_open=False)).behind == (3,)
    pair = [one._replace(groups=one.groups[:1]) for one in said]  # the others run other models
    alone = StatusReport(2, (GroupStatus("t", (2, 3), 0, (), None, 0.0),), False, "", 0.0, "")
    assert found(*pair, alone, alone._replace(rank=3)).behind == ()


@pytest.mark.parametrize("is_known", [True, False])
def test_a_rank_too_slow_to_report_may_fail_alike(is_known: bool) -> None:
    """If the verdict were that nothing is wrong, its own failure would become a later fault."""
    failed = report(0, ("a",), is_open=False, failure="E", failed_s=0.1)
    failed = failed._replace(groups=failed.groups if is_known else ())
    others = failed._replace(rank=2), failed._replace(rank=2, failed_s=PATIENCE_S + 1)
    silent = {1: NoReport("lives, but does not answer", is_final=False)}
    early = Kind.UNDECIDED if is_known else Kind.NOTHING  # it shares no training with others
    assert found(failed, others[0], absent=silent).kind is early
    late = failed._replace(failed_s=PATIENCE_S + 1)
    assert found(late, others[1], absent=silent).kind is (Kind.FAILED if is_known else Kind.NOTHING)
    for gone in (NoReport(DEAD, is_final=True), NoReport("", is_final=False, has_begun=False)):
        assert found(failed, others[0], absent={1: gone}).kind is Kind.NOTHING


def closed(one: StatusReport, num_closed: int) -> StatusReport:
    """Return a report of a rank that closed a step after ``num_closed`` collectives."""
    return one._replace(groups=tuple(its._replace(num_closed=num_closed) for its in one.groups))


@pytest.mark.parametrize("waits_s", [None, 0.1])
def test_a_rank_that_is_about_to_close_a_step_is_waited_for(waits_s: float | None) -> None:
    """Otherwise it would drop the step that others ended, and begin the one that they dropped."""
    failed = closed(report(1, ("a", "b", "a"), is_open=False, failure="E", failed_s=0.1), 2)
    closing = report(0, ("a", "b"), waits_s=waits_s)  # all ranks have issued the awaited collective
    waits = closed(report(2, ("a", "b", "a", "b"), waits_s=0.1), 2)
    assert found(closing, failed, waits).kind is Kind.UNDECIDED
    between = closed(closing, 2)._replace(is_open=False)
    what = found(between, failed, waits)
    assert (what.kind, what.ranks, what.behind) == (Kind.FAILED, (1,), (0,))
    # Rank 0 is inside the step of the others, and cannot close it.
    assert found(closed(closing, 2), failed, waits).kind is Kind.FAILED
    assert found(report(0, ("a", "b", "a", "b"), waits_s=0.1), failed, waits).kind is Kind.FAILED
    # Rank 0 stayed in the step for too long. If it was a training step, the weights are
    # half-stepped.
    late = failed._replace(failed_s=PATIENCE_S + 1)
    assert found(closing, late, waits).kind is Kind.FAILED
    what = found(closing, ended(late, 2), ended(waits, 2))
    assert (what.kind, what.ranks, what.behind) == (Kind.HALF_STEPPED, (1,), (1,))
    assert "rank 1 failed: E, while rank 0 had not ended the step before. Load a" in what.text


def messages() -> list[str]:
    """Return a message of each kind, as docs/faults.md shows them."""
    units, ahead = ("blocks.0", "blocks.1"), ("blocks.0", "blocks.3")
    waits, other = report(0, units, waits_s=0.1), report(2, units)
    place = "ValueError: no (train.py:40), in the forward of unit blocks.2"
    failed = report(1, units[:1], is_open=False, failure=place)
    last = "ValueError: no (train.py:40), in the backward of unit blocks.0"
    late = report(1, units, is_open=False, failure=last)
    longer = waits._replace(groups=(waits.groups[0]._replace(waited_s=6.0),))
    crossed = [
        StatusReport(
            rank,
            (
                GroupStatus(str(rank), (0, 1), 1, (issued(0, "blocks.0"),), 0, 6.0),
                GroupStatus(str(1 - rank), (0, 1), 0, (), None, 0.0),
            ),
            *(True, "", 0.0, ""),
        )
        for rank in (0, 1)
    ]
    groups = crossed[0].groups[:1], (crossed[1].groups[1], saving(6.0, world=2))
    apart = [one._replace(groups=its) for one, its in zip(crossed, groups, strict=True)]
    return [
        found(report(0, ahead, waits_s=0.1), failed, report(2, ahead)).text,
        found(waits, report(1, ("blocks.0", "blocks.2")), other).text,
        found(longer, report(1, units[:1], stack="load (data.py:3)"), other).text,
        found(waits, other, absent={1: NoReport(DEAD, is_final=True)}).text,
        found(longer, other, absent={1: NoReport(STOPPED, is_final=False)}).text,
        found(*crossed).text,
        found(ended(report(0, (*units, "blocks.0")), 2), late, ended(other, 0)).text,
        found(*apart).text,
    ]


@pytest.mark.parametrize("number", range(8))
def test_the_documentation_shows_what_is_said(number: int) -> None:
    page = Path(__file__).parents[2] / "docs" / "faults.md"
    assert f"`{messages()[number]}`" in page.read_text(), messages()[number]


@given(st.data())
def test_ranks_in_one_order_are_never_at_fault(data: st.DataObject) -> None:
    """However far each rank has come, only late ranks are named."""
    world = data.draw(st.integers(2, 5))
    said = []
    for rank in range(world):
        units = ORDER[: data.draw(st.integers(0, len(ORDER)))]
        waits = data.draw(st.none() | st.floats(0, 20)) if units else None
        said.append(report(rank, units, world=world, waits_s=waits))
    least = min(len(one.groups[0].recent) for one in said)
    what = found(*said)
    assert what.kind in (Kind.NOTHING, Kind.LATE)
    for rank in what.ranks:
        assert said[rank].groups[0].waiting is None
    if what.kind is Kind.LATE:
        assert any(len(said[rank].groups[0].recent) == least for rank in what.ranks) or any(
            len(one.groups[0].recent) == least and one.groups[0].waiting is not None for one in said
        )


def test_a_rank_that_has_not_begun_is_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may read data for any time before it shards its model."""
    monkeypatch.setenv("FULLSHARD_PATIENCE_S", "0.01")
    liveness = Liveness(dist.HashStore())
    for _ in range(2):
        (no_report,) = liveness.no_reports([1]).values()
        assert no_report == NoReport("has not begun to train yet", is_final=False, has_begun=False)
        assert not no_report.may_train


def test_a_silence_that_was_waited_for_is_not_waited_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Voters inherit the silence that the watch measured; a new heartbeat ends it."""
    monkeypatch.setenv("FULLSHARD_PATIENCE_S", "5")  # 30 s of silence are too long
    at_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: at_s[0])
    monkeypatch.setattr(time, "sleep", lambda _: None)

    def sign(store: dist.Store, member: int, number: int) -> None:
        store.set(f"fullshard/heartbeat/{member}", f"elsewhere 1 1 {number}")

    of_life, of_job = dist.HashStore(), dist.HashStore()
    for rank, member in ((0, 4), (1, 6)):
        sign(of_life, rank, 1)
        sign(of_job, member, 9)
    watching, voting = Liveness(of_life), Liveness(of_job)
    watching.no_reports([0, 1])
    at_s[0] = 120.0
    assert watching.silent_since() == {0: 100.0, 1: 100.0}
    sign(of_life, 0, 2)
    assert watching.silent_since() == {1: 100.0}
    voting.take_over({4: 100.0, 6: 100.0})
    sign(of_job, 4, 10)
    at_s[0] = 131.0
    found = voting.no_reports([4, 6])
    assert [found[member].is_final for member in (4, 6)] == [False, True]
    assert not Liveness(of_job).no_reports([6])[6].is_final


def test_ranks_that_all_meet_wait_for_nobody() -> None:
    """Connecting may take longer than the patience where no connection is possible."""
    rendezvous = Issued(0, "rendezvous", "", 0)
    said = {
        rank: StatusReport(
            rank, (GroupStatus("0", (0, 1), 1, (rendezvous,), 0, 9.0),), True, "", 0.0, ""
        )
        for rank in (0, 1)
    }
    assert diagnose(said, {}, patience_s=PATIENCE_S).kind is Kind.NOTHING


def test_a_rank_that_dies_while_it_rings_silences_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr("fullshard.watch.rounds.own_store", lambda: store)
    own = Rounds(0, 2)
    store.add("fullshard/rounds", 1)  # the rank dies before its trigger is complete
    assert own.next_begun() is None
    own.trigger(after=own.num_triggered)
    assert [own.next_begun() for _ in range(3)] == [1, 2, None]


class Counting:
    """A store that counts its requests."""

    def __init__(self) -> None:
        self.inner, self.num_asked = dist.HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        self.num_asked += 1
        return getattr(self.inner, name)


def ranks_of(world: int, patch: pytest.MonkeyPatch) -> tuple[Counting, list[Rounds]]:
    store = Counting()
    patch.setattr("fullshard.watch.rounds.own_store", lambda: store)
    return store, [Rounds(rank, world) for rank in range(world)]


@pytest.mark.parametrize("world", [2, 8])
def test_what_was_said_in_earlier_rounds_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    store, ranks = ranks_of(world, monkeypatch)
    sizes = []
    for number, units in enumerate([("a",), ("a", "b"), ("a", "b", "c")], 1):
        ranks[0].trigger(after=ranks[0].num_triggered)
        for rank, one in enumerate(ranks):
            assert one.next_begun() == number
            failure = "E: no" if rank == 1 else ""
            waits_s = None if failure else 0.1
            own = report(
                rank, units[: len(units) - rank % 2], world=world, failure=failure, waits_s=waits_s
            )
            one.report(number, own)
        found = {one.verdict(number).text for one in ranks}
        assert len(found) == 1 and f"the gather of unit {units[-1]}" in found.pop()
        sizes.append(store.inner.num_keys())
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] < 5  # independent of the number of ranks


class Interrupted(Counting):
    """A store on which another rank acts right before a verdict is written."""

    def __getattr__(self, name: str) -> Any:
        if name in ("set", "compare_set"):
            return partial(self._write, getattr(self.inner, name))
        return getattr(self.inner, name)

    def _write(self, write: Any, key: str, *values: str) -> Any:
        before, self.before = self.before, None
        if before is not None and key.startswith("fullshard/round"):
            before()
        else:
            self.before = before
        return write(key, *values)

    before: Any = None


def test_two_diagnoses_of_one_round_are_one_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Interrupted()
    monkeypatch.setattr("fullshard.watch.rounds.own_store", lambda: store)
    one, other = [Rounds(rank, 2) for rank in range(2)]
    verdicts = iter([Diagnosis(Kind.LATE, (rank,), f"rank {rank} is late") for rank in range(2)])
    monkeypatch.setattr("fullshard.watch.rounds.diagnose", lambda *_, **__: next(verdicts))
    seen = []

    def meanwhile() -> None:
        other._diagnose(1, 2)
        seen.append(other.verdict(1))

    store.before = meanwhile
    one._diagnose(1, 1)
    assert [one.verdict(1)] == seen


def test_few_look_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each of many ranks would query all others in each round."""
    store, ranks = ranks_of(64, monkeypatch)
    ranks[3].report_exit("exited")
    asked = {}
    for rank, one in enumerate(ranks):
        before = store.num_asked
        if rank != 3:
            one.report(1, report(rank, ("a",), world=64))
        asked[rank] = store.num_asked - before
    assert sum(number > 10 for number in asked.values()) < 10
    assert store.inner.check(["fullshard/round/1/decision"])  # the last rank knows of the exit


def test_a_rank_that_begins_later_knows_the_era_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would wait for the others under another key."""
    store, (one, other) = ranks_of(2, monkeypatch)
    assert (one.last_fault, other.last_fault) == ("0", "0")
    failed = report(1, ("a",), world=2, is_open=False, failure="E")
    for number, first in ((1, report(0, ("a", "b"), world=2, waits_s=0.1)), (2, failed)):
        one.report(number, first._replace(rank=0))
        other.report(number, failed)
        assert one.verdict(number) == other.verdict(number)
        assert one.verdict(number).is_fault == (number == 1)
    store.add("fullshard/rounds", 3)  # the third round has begun
    later = Rounds(1, 2)
    assert later.last_fault == one.last_fault == "1"
    store.set("fullshard/trigger/3", "")
    assert later.next_begun() == 3
