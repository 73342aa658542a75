"""A fault on one rank: the errors of all ranks, and the weights afterwards."""

from __future__ import annotations

import atexit
import ctypes
import gc
import itertools
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    checkpoint,
    fully_shard,
)
from fullshard._torch import world as _world
from fullshard.comm import C10d, Pending, Wrapper
from fullshard.comm.blocking import all_to_all
from fullshard.comm.c10d import Transport, TransportRequest, way_of
from fullshard.comm.fault_domain import fault_domain
from fullshard.comm.heartbeat import last_beat
from fullshard.comm.ledger import ledger_of
from fullshard.comm.liveness import exit_reason_key
from fullshard.comm.mesh import collectives_of_group, collectives_of_twin, wrapped
from fullshard.engine.unshard import copy_all
from fullshard.errors import LostRankError, PeerError, ProtocolError, TornStepError
from fullshard.optim import clip_grad_norm_
from fullshard.schedule import Event
from fullshard.schedule.triggers import TaskEnd
from fullshard.watch import Step, begin, watcher
from tests.kit.torn_steps import equals
from tests.kit.watch import LAYOUTS, Tower, step, tower, wait_for_the_end_of
from tests.ranks.autograd import engine_of
from tests.ranks.models import Trouble, fill, full_parameters, heard, noise, shard_units
from tests.ranks.pool import RankPool, on_ranks

WIRES = ["1", "0"]


def left_out(face: str, layout: str) -> dict[str, Tensor]:
    """Train as ``faulty`` does, but without the steps that have faults."""
    model = tower(face, layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in (0, 1, 3, 5):
        step(model, optimizer, number)
    return full_parameters(model)


def faulty(fault: str, face: str, layout: str, wire: str) -> list[str]:
    """Train with a fault on rank 1 in two of the steps; return the errors of this rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_SHARED_MEMORY", wire)
        patch.setenv("FULLSHARD_PATIENCE_S", "3")  # heartbeats may be late on a loaded machine
        dist.barrier()
        model = tower(face, layout)
        inner = model.module if isinstance(model, FullyShardedDataParallel) else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        inner.blocks[0].weight.register_post_accumulate_grad_hook(
            lambda _: raises(_) if inner.fault == "end" else None
        )
        said = []
        for number in range(6):
            inner.fault = fault if number in (2, 4) and dist.get_rank() == 1 else ""
            try:
                step(model, optimizer, number)
            except (PeerError, ProtocolError, Trouble) as error:
                kept = [p.grad is not None for p in model.parameters()]
                assert isinstance(error, Trouble) or not any(kept), (number, kept, error)
                said.append(f"{type(error).__name__}: {error}")
        patch.setenv("FULLSHARD_SHARED_MEMORY", "1")
        equals(full_parameters(model), left_out(face, layout))
        return said


def half_stepped(path: Path, layout: str, wire: str, clips: bool, late: int = -1) -> list[str]:
    """Fail on rank 1 after the last collective of step 2; resume from a checkpoint.

    Rank ``late`` clips after the other ranks know of the fault.

    Returns:
        The errors of this rank in steps 2 and 3.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_SHARED_MEMORY", wire)
        patch.setenv("FULLSHARD_PATIENCE_S", "3")
        dist.barrier()
        model = fill(Tower(), scale=0.4)
        shard_units(model, (*model.blocks, model.head), layout=LAYOUTS[layout])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        said = []

        def one(number: int, *, fails: bool = False) -> None:
            era = fault_domain().era
            optimizer.zero_grad()
            x = noise(3, 6, seed=10 * number + dist.get_rank()).requires_grad_()
            if fails:
                x.register_hook(raises)
            model(1 * x).square().sum().backward()  # the hook runs after all hooks of the model
            if number == 2 and dist.get_rank() == late:
                wait_for_the_end_of(era)
            if clips:
                clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()

        for number in range(4):
            if number == 2:
                checkpoint.save(path, model, optimizer, step=1)
            try:
                one(number, fails=number == 2 and dist.get_rank() == 1)
            except (TornStepError, PeerError, Trouble) as error:
                said.append(f"{number} {type(error).__name__}: {error}")
        if not clips:
            checkpoint.load(path, model, optimizer)
        one(4)
        patch.setenv("FULLSHARD_SHARED_MEMORY", "1")
        found = full_parameters(model)
        model = tower("fully_shard", layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in (0, 1, 3, 4) if clips else (0, 1, 4):
            step(model, optimizer, number)
        equals(found, full_parameters(model))
        return said


def raises(_: Tensor) -> None:
    raise Trouble("at the end")


@pytest.mark.parametrize(("world", "layout", "wire"), [(2, "rows", "1"), (3, "ragged", "0")])
def test_a_step_that_only_some_ranks_end_is_told_on_all(
    pool: RankPool, tmp_path: Path, world: int, layout: str, wire: str
) -> None:
    told = pool.run(world, half_stepped, tmp_path / "step-000001", layout, wire, False)
    for rank, said in enumerate(told):
        assert said[-1].startswith("3 TornStepError: rank 1 failed: an exception, in "), said
        assert "in a step that rank 0" in said[-1] or world == 3
        assert said[:-1] == (["2 Trouble: at the end"] if rank == 1 else [])
    assert len({said[-1] for said in told}) == 1


def test_who_comes_late_to_clip_leaves_it_out(pool: RankPool, tmp_path: Path) -> None:
    """All ranks drop a step whose norm they wait for, also a rank that comes late to clip.

    Collectives that a rank issues after its step was dropped do not count for the next step.
    """
    told = pool.run(3, half_stepped, tmp_path / "step-000001", "rows", "1", True, 2)
    for rank in (0, 2):
        assert len(told[rank]) == 1
        assert told[rank][0].startswith("2 PeerError: rank 1 failed: an exception, in "), told
    assert told[1] == ["2 Trouble: at the end"]


KINDS = [
    (2, "fully_shard", "rows", "1"),
    (4, "fully_shard", "ragged", "1"),
    (4, "fully_shard", "rows", "0"),
    (2, "flat", "", "1"),
    (3, "flat", "", "0"),
]


@pytest.mark.parametrize(("world", "face", "layout", "wire"), KINDS)
@pytest.mark.parametrize("fault", ["forward", "backward", "skip"])
def test_a_step_that_fails_on_one_rank_is_left_out_by_all(
    pool: RankPool, fault: str, world: int, face: str, layout: str, wire: str
) -> None:
    for rank, said in enumerate(pool.run(world, faulty, fault, face, layout, wire)):
        assert len(said) == 2, said
        for one in said:
            if fault == "skip":
                assert one.startswith("ProtocolError"), one
                assert "blocks.2 on rank" in one and "on rank 1" in one, one
            elif rank == 1:
                assert one.startswith("Trouble"), one
            else:
                assert one.startswith("PeerError: rank 1 failed"), one
                assert fault == "backward" or "Trouble: in forward" in one, one
                assert re.search(rf"rank {rank} has waited [\d.]+ s for the gather of unit", one), (
                    one
                )


@pytest.mark.parametrize(("world", "layout", "wire"), [(2, "rows", "1"), (3, "ragged", "0")])
def test_a_hook_that_fails_at_the_end_of_backward_is_told_on_all(
    pool: RankPool, world: int, layout: str, wire: str
) -> None:
    told = pool.run(world, faulty, "end", "fully_shard", layout, wire)
    for rank, said in enumerate(told):
        who = "Trouble: at the end" if rank == 1 else "PeerError: rank 1 failed: "
        assert len(said) == 2 and all(one.startswith(who) for one in said), said
        assert rank == 1 or all("at the end of a backward" in one for one in said), said


@on_ranks(2)
def test_an_evaluation_before_the_backward_ends_no_step() -> None:
    model = tower("fully_shard", "rows")
    step_of = engine_of(model).steps.step
    for _ in range(2):
        loss = model(noise(3, 6)).sum()
        with torch.no_grad():
            model(noise(3, 6))
        assert step_of.is_open
        loss.backward()
        assert not step_of.is_open
        with torch.no_grad():
            model(noise(3, 6))
        assert not step_of.is_open


def late_for_a_fault(late: list[int], leaves: list[int]) -> list[str]:
    """Fail on rank 1 in two steps, which ``late`` ranks begin after the other ranks dropped them.

    The late ranks belong to another replica, so the forwards of ranks 0 and 1 do not wait for them.
    The ranks in ``leaves`` also keep another model and an unused output of it.
    """
    kept = (other := tower("fully_shard", "rows"))(noise(3, 6, seed=7)) if leaves else None
    if leaves and dist.get_rank() not in leaves:
        del other, kept
        gc.collect()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_PATIENCE_S", "3")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        model = fill(Tower(), scale=0.4)
        shard_units(model, model.blocks, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        said = []
        for number in range(6):
            is_hit = number in (2, 4)
            model.fault = "forward" if is_hit and dist.get_rank() == 1 else ""
            if is_hit and dist.get_rank() in late:
                wait_for_the_end_of(fault_domain().era)
            try:
                step(model, optimizer, number)
            except (PeerError, Trouble) as error:
                said.append(f"{number} {type(error).__name__}")
        equals(full_parameters(model), left_out("fully_shard", "rows"))
        return said


@pytest.mark.parametrize(
    ("late", "leaves"), [([2], []), ([2, 3], []), ([2], [1]), ([2], [2]), ([2, 3], [0, 2])]
)
def test_who_comes_late_leaves_out_the_step_that_others_dropped(
    pool: RankPool, late: list[int], leaves: list[int]
) -> None:
    for rank, said in enumerate(pool.run(4, late_for_a_fault, late, leaves)):
        name = "Trouble" if rank == 1 else "PeerError"
        assert said == [f"2 {name}", f"4 {name}"], rank


@on_ranks(1, process_group=False)
def test_a_step_that_is_dropped_issues_nothing_more() -> None:
    """An action whose era ends before its collective does not issue the collective."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mp_policy=half)
    x = torch.ones(2, 8)
    model(x).sum().backward()

    def ends_and_copies(*args: Any) -> None:
        fault_domain().end_era(lambda: PeerError("rank 1 failed"))
        copy_all(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fullshard.engine.unshard.copy_all", ends_and_copies)
        with pytest.raises(PeerError, match="rank 1 failed"):
            model(x)
    assert dist.group.WORLD is not None
    ledger = ledger_of(dist.group.WORLD)
    assert ledger.era is not fault_domain().era or ledger.num_issued == 0
    dist.destroy_process_group()


@on_ranks(2)
def test_waits_on_every_group_can_be_ended() -> None:
    world = dist.group.WORLD
    assert world is not None
    twin = collectives_of_twin(collectives_of_group(world, "cpu"), "cpu").group
    assert twin is not None and ledger_of(twin).breaks is not None
    other = dist.new_group()
    assert isinstance(other, dist.ProcessGroup)
    all_to_all(torch.zeros(4, dtype=torch.uint8), [2, 2], [2, 2], other)
    assert ledger_of(other).breaks is not None


def meet_who_failed() -> str:
    """Fail on rank 1 while rank 0 waits to connect; rank 1 connects in the next era."""
    store, said = dist.PrefixStore("meets later", _world.default_store()), ""
    begin()
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    wire = C10d(group, "cpu")
    if dist.get_rank() == 0:
        ends = threading.Thread(target=fail_as_ranks_meet, args=(group, store))
        ends.start()
        try:
            way_of(group, TransportRequest(Transport.SHARED))
        except PeerError as error:
            said = str(error)
        ends.join()
        store.set("is over", b"")
    else:
        store.wait(["meets"])
        fault_domain().end_era(lambda: PeerError("rank 1 failed"))
        store.wait(["is over"])
    gathered = torch.empty(2)
    wire.all_gather([gathered], [torch.tensor([float(dist.get_rank())])]).wait()
    assert gathered.tolist() == [0.0, 1.0]
    del wire
    dist.destroy_process_group(group)
    return said


def fail_as_ranks_meet(group: dist.ProcessGroup, store: dist.Store) -> None:
    while ledger_of(group).waiting is None:
        time.sleep(0.01)
    fault_domain().end_era(lambda: PeerError("rank 1 failed"))
    store.set("meets", b"")


def test_a_fault_ends_a_rendezvous(pool: RankPool) -> None:
    """A fault ends a wait for ranks to connect; the missing rank may wait in another group."""
    assert pool.run(2, meet_who_failed) == ["rank 1 failed", ""]


def never_come() -> str:
    """Let rank 1 miss a connection within the group's time-out, without a watch."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    assert isinstance(group, dist.ProcessGroup)
    said = ""
    if dist.get_rank() == 0:
        with pytest.raises(LostRankError) as raised:
            way_of(group, TransportRequest(Transport.SHARED))
        said = str(raised.value)
    dist.barrier()
    dist.destroy_process_group(group)
    return said


def test_a_rank_that_never_meets_is_named(pool: RankPool) -> None:
    first, _ = pool.run(2, never_come)
    assert first == ("rank 1 did not connect to ranks 0, 1 within the 2 s that this rank waits")


def gathered_after(fault: str) -> str:
    """Fail on rank 1 in a step, then gather the weights on all ranks instead of another step."""
    model = tower("fully_shard", "rows")
    inner: Any = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer, 0)
    before = full_parameters(model)
    inner.fault = fault if dist.get_rank() == 1 else ""
    said = ""
    try:
        step(model, optimizer, 1)
    except (PeerError, Trouble) as error:
        said = type(error).__name__
    found = checkpoint.full_state_dict(inner, rank0_only=False)
    for name, value in before.items():
        assert torch.equal(found[name], value)
    assert all(param.grad is None for param in model.parameters()) or dist.get_rank() == 1
    return said


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_weights_are_gathered_right_after_a_failure(pool: RankPool, fault: str) -> None:
    assert pool.run(3, gathered_after, fault) == ["PeerError", "Trouble", "PeerError"]


def lose_the_model(fails: list[int]) -> str:
    """Fail in a step on ``fails``, delete the model, and train another model."""
    model: Any = tower("fully_shard", "rows")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.fault = "forward" if dist.get_rank() in fails else ""
    said = ""
    try:
        step(model, optimizer, 0)
    except (PeerError, Trouble) as error:
        said = str(error)
    del model, optimizer
    gc.collect()
    other = tower("fully_shard", "ragged")
    step(other, torch.optim.SGD(other.parameters(), lr=0.1), 1)
    full_parameters(other)
    return said


def test_a_failure_is_known_when_its_model_is_gone(pool: RankPool) -> None:
    assert pool.run(3, lose_the_model, [0, 1, 2]) == ["in forward"] * 3
    first, second, third = pool.run(3, lose_the_model, [1])
    assert second == "in forward"
    assert first.startswith("rank 1 failed") and third.startswith("rank 1 failed")


class Ends:
    """A recorder that reports another rank's fault when a backward ends."""

    def record(self, event: Event) -> None:
        if isinstance(event.trigger, TaskEnd):
            fault_domain().end_era(lambda: PeerError("rank 7 failed"))


@on_ranks(2)
def test_no_rank_goes_on_with_a_step_that_others_drop() -> None:
    model = tower("fully_shard", "rows")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.set_requires_gradient_sync(False)  # so that the end of backward waits for nothing
    engine_of(model).recorder = Ends()
    loss = model(noise(3, 6, seed=dist.get_rank())).square().sum()
    with pytest.raises(PeerError, match="rank 7 failed"):
        loss.backward()
    engine_of(model).recorder = None
    model.set_requires_gradient_sync(True)
    for number in (0, 1, 3, 5):
        step(model, optimizer, number)
    equals(full_parameters(model), left_out("fully_shard", "rows"))


def fail_alike(late_s: float) -> int:
    """Fail on all ranks at the same place, so that no rank waits for another; return the failures.

    Rank 1 fails 1 s later if its reports arrive ``late_s`` later.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_PATIENCE_S", "10")
        model = tower("fully_shard", "rows")
        if late_s and dist.get_rank() == 1:
            report_late(late_s)
            model.blocks[1].register_forward_hook(lambda *_: time.sleep(1.0 if model.fault else 0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        failures = 0
        for number, fault in enumerate(["", "forward", "backward", "", "forward", ""]):
            model.fault = fault
            try:
                step(model, optimizer, number)
            except Trouble:
                failures += 1
        return failures


def hold_python(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def report_late(seconds: float) -> None:
    """Delay every second report of this rank in this job, after its status was read."""
    rounds: Any = watcher()._rounds  # type: ignore[union-attr]
    report, number = rounds.report, itertools.count()

    def late_report(*args: Any) -> None:
        time.sleep(seconds if next(number) % 2 == 0 else 0.0)
        report(*args)

    rounds.report = late_report


@pytest.mark.parametrize("late_s", [0.0, 5.0])
def test_a_step_that_fails_on_all_ranks_is_their_own(pool: RankPool, late_s: float) -> None:
    assert pool.run(3, fail_alike, late_s) == [3, 3, 3]


class Fails(Wrapper):
    """Collectives that fail on this rank while ``model`` has a fault."""

    model: Any = None

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        if self.model.fault:
            raise Trouble("in forward")
        return self.inner.all_gather(outputs, sources)


def ends_late(face: str) -> list[str]:
    """End each step on rank 0 1.5 s late; fail on rank 1 in two of the steps after these.

    Rank 1 fails before its first gather, which needs rank 0.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_PATIENCE_S", "3")
        with wrapped(Fails):
            model = tower(face, "rows")
        inner = model.module if isinstance(model, FullyShardedDataParallel) else model
        patch.setattr(Fails, "model", inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        end = Step.end

        def late_end(self: Step, error: Any = None, **how: bool) -> None:
            if how.get("trained") and dist.get_rank() == 0:
                time.sleep(1.5)  # the next round still sees this step as open
            end(self, error, **how)

        patch.setattr(Step, "end", late_end)
        said = []
        for number in range(6):
            inner.fault = "forward" if number in (2, 4) and dist.get_rank() == 1 else ""
            try:
                step(model, optimizer, number)
            except (PeerError, Trouble) as error:
                said.append(f"{number} {type(error).__name__}")
        patch.undo()
        equals(full_parameters(model), left_out(face, "rows"))
        return said


@pytest.mark.parametrize("face", ["fully_shard", "flat"])
def test_no_rank_drops_the_step_before_the_one_that_failed(pool: RankPool, face: str) -> None:
    for rank, said in enumerate(pool.run(3, ends_late, face)):
        name = "Trouble" if rank == 1 else "PeerError"
        assert said == [f"2 {name}", f"4 {name}"], rank


def dawdle(wire: str) -> str:
    """Train while rank 1 is late for one step; return the log."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_SHARED_MEMORY", wire)
        patch.setenv("FULLSHARD_PATIENCE_S", "0.5")
        dist.barrier()
        model = tower("fully_shard", "rows")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with heard() as said:
            for number in range(3):
                if number == 1 and dist.get_rank() == 1:
                    _load_slowly()
                step(model, optimizer, number)
    return "\n".join(said)


def _load_slowly() -> None:
    time.sleep(2.0)


@pytest.mark.parametrize("wire", WIRES)
def test_a_rank_that_is_late_is_told_of_and_waited_for(pool: RankPool, wire: str) -> None:
    for rank, said in enumerate(pool.run(2, dawdle, wire)):
        assert ("ERROR: " in said) == (rank == 0)  # one line in the output of the job
        assert "rank 1 has not reached this collective" in said, said
        assert "_load_slowly (" in said, said
        assert re.search(r"rank 0 has waited [\d.]+ s for the gather of unit \(root\)", said), said


def in_a_new_job(name: str) -> int:
    """Create the default process group again, without a watch; return the port of its store."""
    rank, world, store = dist.get_rank(), dist.get_world_size(), _world.default_store()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world
    )
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    assert isinstance(store, dist.TCPStore)
    return store.port


def connections(port: int) -> set[int]:
    """Return the file descriptors of this process's connections to ``port``."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family != socket.AF_UNIX and one.getpeername()[1] == port:
                    found.add(int(name))
        except OSError:  # not a socket, not connected, or closed
            pass
    return found


def train_after(then: Callable[[], None]) -> str:
    """Train a step, call ``then``, and train another; return the log.

    Silent ranks are reported as lost as soon as possible.
    """
    with heard() as said, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_PATIENCE_S", "0.5")  # 3 s of silence are too long then
        patch.setattr("fullshard.watch.rounds.ANSWER_S", 0.2)
        dist.barrier()
        model = tower("fully_shard", "rows")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, 0)
        then()
        step(model, optimizer, 1)
    return "\n".join(said)


def lose_the_store() -> tuple[str, bool]:
    """Close rank 1's connections to the store, while rank 0 is silent for longer than allowed.

    Returns:
        The log of this rank, and True if the heartbeat of rank 1 continues.
    """
    port = in_a_new_job("loses the store")
    before = connections(port)
    begin()
    until_s = time.monotonic() + 20.0
    while len(own := connections(port) - before) < 2:  # one of them waits
        assert time.monotonic() < until_s
        time.sleep(0.01)

    def reset() -> None:
        if dist.get_rank() == 0:
            time.sleep(9.0)
        if dist.get_rank() == 1:
            for one in own:
                with socket.socket(fileno=os.dup(one)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)

    said = train_after(reset)
    beat = last_beat(_world.default_store(), 1)
    time.sleep(2.5)
    watching = watcher()
    assert watching is not None and not watching.is_over
    lives = last_beat(_world.default_store(), 1) != beat
    dist.barrier()
    dist.destroy_process_group()
    return said, lives


def test_a_connection_to_the_store_that_is_reset_ends_nothing(pool: RankPool) -> None:
    found = pool.run(3, lose_the_store)
    assert [lives for _, lives in found] == [True] * 3
    warning = "the connection to the store"
    assert [said.count(warning) for said, _ in found] == [0, 1, 0], found
    for said, _ in found:
        assert "rank 0 has not reached this collective" in said and "rank 1 gives" not in said, said


@on_ranks(2)
def test_a_rank_that_gives_no_sign_of_life_but_lives_is_waited_for() -> None:
    """Ranks wait for a rank whose C code holds Python's lock longer than ranks may be silent."""

    def hold() -> None:
        if dist.get_rank() == 1:
            hold_python(9.0)

    said = train_after(hold)
    assert "rank 1 has no heartbeat, though its process is alive; rank 0 has waited" in said, said


def fork() -> str:
    """Fork children on rank 1 that end as programs do, one by an exception; return the log."""
    in_a_new_job("forks")

    def children() -> None:
        if dist.get_rank() == 1:
            for end in (begin, _fail, atexit._run_exitfuncs):
                pid = _forked(end)
                until_s = time.monotonic() + 20
                while os.waitpid(pid, os.WNOHANG) == (0, 0):
                    assert time.monotonic() < until_s, "the child hangs"
                    time.sleep(0.05)
        else:
            time.sleep(3.0)

    said = train_after(children)
    assert not _world.default_store().check([exit_reason_key(1)])
    dist.barrier()
    dist.destroy_process_group()
    return said


def _fail() -> None:
    sys.excepthook(ValueError, ValueError("no"), None)


def _forked(end: Callable[[], None]) -> int:
    """Fork a child that only calls ``end``; return its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            end()
        finally:
            os._exit(0)
    return pid


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # the process has threads
def test_a_forked_child_does_not_speak_for_its_parent(pool: RankPool) -> None:
    pool.run(2, fork)
