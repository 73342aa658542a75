"""Collectives that only a device waits for: reports on ranks, and the end of the groups."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import fully_shard, watch
from fullshard.comm.ledger import Ledger, ledger_of
from fullshard.comm.protocol import Done
from fullshard.errors import PeerError, ProtocolError
from tests.ranks.models import Trouble, full_parameters, heard
from tests.ranks.pool import RankPool

PATIENCE_S = 1.0


class Point:
    """A point in the work of a device; tests set ``is_passed``."""

    def __init__(self) -> None:
        self.is_passed = False

    def query(self) -> bool:
        return self.is_passed


@contextmanager
def on_device() -> Iterator[tuple[Ledger, threading.Event, list[str]]]:
    """Treat all ranks' collectives as a device's; yield the ledger, an abort event, the log."""
    group, aborted = dist.group.WORLD, threading.Event()
    assert group is not None
    ledger = ledger_of(group)
    with heard() as said, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_PATIENCE_S", str(PATIENCE_S))
        patch.setattr(ledger, "aborts", aborted.set)
        patch.setattr(ledger.domain, "aborted_by", None)  # no abort remains after the test
        watch.begin()
        dist.barrier()
        try:
            yield ledger, aborted, said
        finally:
            dist.barrier()


def until(is_so: object) -> bool:
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        if is_so():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


def fails_while_devices_wait() -> list[str]:
    """Fail on rank 1 while only devices of the other ranks wait; return the errors."""
    model = fully_shard(nn.Linear(4, 4, dtype=torch.float64))
    before = full_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with on_device() as (ledger, aborted, logged):
        said = []
        if dist.get_rank() != 1:
            done, stuck = Point(), Point()
            done.is_passed = True
            for label, point in (("unit a", done), ("unit b", stuck)):
                ledger.issue("gather", label, 8, Done, lambda point=point: point).wait()
        else:
            ledger.issue("gather", "unit a", 8, Done).wait()
            assert until(lambda: logged)  # the waits of the other ranks' devices were reported
            watch.report_failure(Trouble("no"))
        assert aborted.wait(30)
        said.append(logged[-1].partition(": ")[2])
        with pytest.raises(PeerError):  # gradients may come from the aborted gather
            optimizer.step()
        for _ in range(2):
            try:
                ledger.issue("gather", "unit c", 8, Done, Point)
            except (PeerError, ProtocolError) as error:
                said.append(f"{type(error).__name__}: {error}")
        assert (
            "rank 1 has not reached this collective (its last: the gather of unit a)" in logged[0]
        ), logged
    after = full_parameters(model)
    assert all(torch.equal(one, after[name]) for name, one in before.items())
    return said


def test_a_rank_that_fails_while_only_devices_wait_is_named_and_the_groups_end(
    pool: RankPool,
) -> None:
    first, *others = pool.run(3, fails_while_devices_wait)
    assert all(one == first for one in others)
    told, once, again = first
    assert told.startswith("rank 1 failed: tests.ranks.models.Trouble: no")
    assert re.search(
        r"rank 0 has waited [\d.]+ s for the gather of unit b \(collective 1 of", told
    ), told
    assert once == f"PeerError: {told}"
    assert again.startswith(f"ProtocolError: {told}. This fault has aborted the process groups")


def comes_late() -> str:
    """Reach a collective late on rank 1: it is reported, and no group is aborted."""
    with on_device() as (ledger, aborted, logged):
        if dist.get_rank() != 1:
            point = Point()
            ledger.issue("gather", "unit a", 8, Done, lambda: point)
        assert until(lambda: logged)
        if dist.get_rank() == 1:
            point = Point()
            ledger.issue("gather", "unit a", 8, Done, lambda: point)
        dist.barrier()
        point.is_passed = True
        assert ledger.wait() is None and not aborted.is_set()
        ledger.issue("gather", "unit b", 8, Done)
        return logged[0].partition(": ")[2]


def test_a_rank_that_comes_late_to_what_devices_wait_for_is_named(pool: RankPool) -> None:
    for told in pool.run(2, comes_late):
        assert told.startswith("rank 1 has not reached this collective, and is at until"), told
