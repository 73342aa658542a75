"""The ledger of collectives: eras, waits, faults and device marks."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard._torch import device as _device
from fullshard.comm.fault_domain import fault_domain
from fullshard.comm.ledger import KEPT, Ledger, Wait, ledger_of, ledgers
from fullshard.comm.mesh import choose_wire, collectives_of_group
from fullshard.comm.protocol import Done
from fullshard.errors import PeerError, ProtocolError
from fullshard.watch import Step
from fullshard.watch.status import GroupStatus
from fullshard.watch.watcher import _group


class Fails:
    """A collective whose wait raises, and would hang if called again."""

    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1
        raise OSError("no descriptors are left")


@contextmanager
def job() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


def test_a_group_of_an_earlier_job_that_is_still_held_is_not_compared() -> None:
    with job() as earlier:
        before = ledger_of(earlier)
        assert ledgers() == [before]
    assert ledgers() == []
    with job() as later:
        after = ledger_of(later)
        assert (after.name, after.ranks) == (before.name, before.ranks) and after is not before
        assert ledgers() == [after]


class Point:
    def __init__(self) -> None:
        self.is_passed = False

    def query(self) -> bool:
        return self.is_passed


def test_a_wait_of_a_device_counts_from_when_it_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the device makes progress, a wait starts when the ledger first sees it."""
    at_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: at_s[0])
    points = [Point() for _ in range(3)]
    with job() as group:
        ledger = ledger_of(group)
        for point in points:
            ledger.issue("gather", "", 8, Done, lambda point=point: point)
        at_s[0] = 104.0
        assert ledger.wait(5.0) is None  # the device is not queried yet
        at_s[0] = 110.0
        assert ledger.wait(5.0) == Wait((0, "gather", "", 8), 110.0, on_device=True)
        points[0].is_passed = True
        at_s[0] = 114.0
        assert ledger.wait(5.0) == Wait((1, "gather", "", 8), 114.0, on_device=True)
        at_s[0] = 120.0
        assert ledger.wait(5.0) == Wait((1, "gather", "", 8), 114.0, on_device=True)
        for point in points:
            point.is_passed = True
        assert ledger.wait() is None


def test_who_goes_on_alone_or_in_another_job_is_not_refused() -> None:
    """Such a rank uses none of the aborted groups."""
    with job() as group:
        ledger = ledger_of(group)
        ledger.aborts = lambda: None
        fault_domain().end_era(failed)
        for kind in (PeerError, ProtocolError):
            with pytest.raises(kind, match="rank 1 failed"):
                ledger.issue("gather", "", 8, Done)
        with pytest.raises(PeerError, match="rank 1 failed"):
            fault_domain().check_aborted()
    fault_domain().check_aborted()
    with job() as group:
        fault_domain().check_aborted()
        ledger = ledger_of(group)
        ledger.aborts = lambda: None
        ledger.issue("gather", "", 8, Done)
        fault_domain().end_era(failed)
        with pytest.raises(PeerError, match="rank 1 failed"):
            ledger.issue("gather", "", 8, Done)


def test_what_cannot_be_marked_is_not_watched() -> None:
    with job() as group:
        ledger = ledger_of(group)
        ledger.issue("gather", "", 8, Done, lambda: None)  # a graph capture allows no mark
        assert ledger.wait() is None


def failed() -> Exception:
    return PeerError("rank 1 failed")


def test_what_a_dropped_step_still_issues_is_not_counted_in_the_next_era(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with job() as group:
        ledger = ledger_of(group)
        monkeypatch.setattr(fault_domain().inside, "era", fault_domain().era)
        ledger.issue("gather", "", 8, Done).wait()
        fault_domain().end_era(failed)
        with pytest.raises(PeerError, match="rank 1 failed"):
            ledger.issue("gather", "", 8, Done)
        monkeypatch.setattr(fault_domain().inside, "era", None)
        ledger.issue("gather", "", 8, Done).wait()
        assert [entry[0] for entry in ledger.entries] == [0]


def test_ranks_that_are_threads_leave_no_step_behind() -> None:
    """One thread enters and leaves its step before the other does."""
    barrier = threading.Barrier(2)
    left: list[object] = []

    def run(*, first: bool) -> None:
        step = Step()
        if not first:
            barrier.wait(9.0)
        with step.around():
            for _ in range(2):
                barrier.wait(9.0)
        if first:
            barrier.wait(9.0)
        left.append(fault_domain().inside.era)

    threads = [threading.Thread(target=run, kwargs={"first": first}) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left == [None, None]
    assert fault_domain().inside.era is None


def test_who_is_behind_is_told_once_by_whatever_it_does_next() -> None:
    with job() as group:
        ledger = ledger_of(group)
        fault_domain().end_era(failed, is_behind=True)
        with pytest.raises(PeerError, match="rank 1 failed"):
            ledger.issue("sum", "", 8, Done)
        ledger.issue("gather", "", 8, Done).wait()
        assert ledger.num_issued == 1


def test_a_host_that_waits_to_start_a_collective_is_seen() -> None:
    seen = []

    def start() -> Done:
        with ledger.starting("comparison"):
            wait = ledger.wait()
            assert wait is not None
            seen.append(wait.entry[:2])
        return Done()

    with job() as group:
        ledger = ledger_of(group)
        ledger.issue("gather", "", 8, Done).wait()
        ledger.issue("gather", "", 8, start).wait()
        assert seen == [(1, "comparison")]
        assert ledger.wait() is None


def test_a_fault_that_comes_before_the_wait_ends_it() -> None:
    """A fault may come between the check for it and the wait, so the waiter registers first."""
    with job() as group:
        ledger = ledger_of(group)
        pending = ledger.issue("gather", "", 8, Never)
        fault_domain().end_era(failed)
        with pytest.raises(PeerError, match="rank 1 failed"):
            pending.wait()
        assert ledger.waiting is None


class Never:
    def wait(self) -> None:
        pytest.fail("the wait does not end")


@pytest.mark.parametrize("at", ["start", "wait"])
def test_any_exception_of_a_collective_is_explained(at: str) -> None:
    with job() as group, pytest.raises(PeerError) as raised:
        ledger = ledger_of(group)
        ledger.domain.explain = lambda error, ledger, entry: failed()
        if at == "start":
            ledger.issue("gather", "", 8, lambda: Fails().wait() or Done())
        ledger.issue("gather", "", 8, Fails).wait()
    assert isinstance(raised.value.__cause__, OSError)


def test_a_wait_that_failed_is_not_tried_again() -> None:
    fails = Fails()
    with job() as group:
        pending = ledger_of(group).issue("gather", "", 8, lambda: fails)
        with pytest.raises(OSError, match="no descriptors"):
            pending.wait()
        with pytest.raises(ProtocolError, match=r"an earlier wait failed with OSError: no descr"):
            pending.wait()
    assert fails.num_waits == 1


@pytest.mark.parametrize("ahead", [40, 400])
def test_the_oldest_that_a_device_has_not_done_is_named(ahead: int) -> None:
    """The oldest unfinished collective is reported, however far the host is ahead."""
    points = [Point() for _ in range(ahead)]
    with job() as group:
        ledger = ledger_of(group)
        for number, point in enumerate(points):
            points[2].is_passed = points[1].is_passed = points[0].is_passed = number > 2
            ledger.issue("gather", f"unit blocks.{number}", 8, Done, lambda point=point: point)
        said = _group(ledger)
        assert said.waiting == 3 and said.on_device
        issued = said.numbered(3)
        assert issued is not None and issued.text() == "the gather of unit blocks.3"
        assert [one.number for one in said.recent] == [3, *range(ahead - KEPT, ahead)]


def test_marks_that_a_device_has_passed_are_not_kept() -> None:
    """The ledger frees them even if no watch reads it for hours."""
    passed: list[Point] = []
    with job() as group:
        ledger = ledger_of(group)
        for _ in range(20):
            for point in passed:
                point.is_passed = True
            passed = [Point() for _ in range(100)]
            for point in passed:
                ledger.issue("gather", "", 8, Done, lambda point=point: point)
        assert len(ledger._underway._marks) <= 300  # of 2,000
        held = weakref.ref(passed.pop(0))
        del point
        assert held() is not None
        for one in passed:
            one.is_passed = True
        first = held()
        assert first is not None
        first.is_passed = True
        del first
        assert ledger.wait() is None and held() is None


def test_a_host_that_waits_for_an_old_collective_names_it() -> None:
    with job() as group:
        ledger = ledger_of(group)
        pending = [ledger.issue("gather", f"unit {n}", 8, Shows(ledger)) for n in range(50)]
        pending[3].wait()
        assert Shows.said.waiting == 3
        issued = Shows.said.numbered(3)
        assert issued is not None and issued.label == "unit 3"


class Shows:
    """A collective that records the ledger's status while it is waited for."""

    said: GroupStatus

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __call__(self) -> Shows:
        return self

    def wait(self) -> None:
        Shows.said = _group(self._ledger)


class Driver:
    """A model of CUDA graph captures: a query in the wrong mode invalidates all captures."""

    def __init__(self) -> None:
        self.mode = threading.local()
        self.is_invalid = False

    def exchange(self, mode: Any) -> int:
        """Exchange the mode of the calling thread; the initial mode is 0 (global)."""
        given = mode._obj
        given.value, self.mode.now = getattr(self.mode, "now", 0), given.value
        return 0

    def query(self) -> bool:
        """Query a mark while another thread captures."""
        self.is_invalid |= getattr(self.mode, "now", 0) == 0
        return False


def test_devices_are_asked_in_a_mode_that_leaves_captures_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    monkeypatch.setattr(_device, "_exchange_of_capture_modes", lambda: driver.exchange)
    with job() as group:
        ledger = ledger_of(group)
        for _ in range(2 * KEPT):  # enough for the host thread to query too
            ledger.issue("gather", "", 8, Done, lambda: driver)
        watch = threading.Thread(target=ledger.wait)
        watch.start()
        watch.join()
        assert ledger.wait() is not None
    assert not driver.is_invalid
    driver.query()  # each thread has its old mode again
    assert driver.is_invalid


def test_devices_are_not_asked_where_that_mode_cannot_be_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(_device, "_exchange_of_capture_modes", lambda: None)
    with job() as group:
        ledger = ledger_of(group)
        ledger.issue("gather", "", 8, Done, lambda: driver)
        assert ledger.wait() is None
    assert not driver.is_invalid


def test_a_group_has_collectives_for_each_device_type() -> None:
    class Group:
        def size(self) -> int:
            return 2

    group: Any = Group()

    def wire(_: dist.ProcessGroup, device_type: str) -> Any:
        return device_type

    before = choose_wire(wire)
    try:
        kinds = ["cpu", "cuda", "cpu"]
        assert [collectives_of_group(group, kind) for kind in kinds] == kinds
    finally:
        choose_wire(before)
