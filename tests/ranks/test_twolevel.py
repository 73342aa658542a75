"""Exchanges between hosts, simulated by ranks of one machine."""

from __future__ import annotations

import copy
import gc
import os
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import FullyShardedDataParallel, Ragged
from fullshard._torch import collectives as _collectives
from fullshard.comm import C10d, columns, twolevel
from fullshard.comm.c10d import Transport, TransportRequest, way_of
from fullshard.comm.protocol import Label
from fullshard.comm.twolevel import TwoLevels
from fullshard.errors import LostRankError, ProtocolError
from tests.kit import shared
from tests.kit.communication import NUMELS, on, part
from tests.kit.shared import any_order_of_all_kinds, gather
from tests.ranks.models import noise, refusal
from tests.ranks.net import batch, make, shard
from tests.ranks.pool import RankPool, on_ranks

CLUSTERS = ("ab", "aabb", "aaab", "abac")
every_cluster = pytest.mark.parametrize("hosts", CLUSTERS)
"""The hosts of the ranks, one letter each."""


def wire_on(hosts: str, timeout_s: float = 30) -> C10d:
    """Return the collectives of a new group on these hosts."""
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    with on(hosts):
        wire = C10d(group, "cpu")
        way_of(group, TransportRequest(Transport.SHARED))
    check_way(group, hosts)
    return wire


def check_way(group: dist.ProcessGroup, hosts: str) -> None:
    """Check that ranks share memory if all hosts have the same number of ranks."""
    way = way_of(group, TransportRequest(Transport.SHARED))
    assert isinstance(way, TwoLevels)
    is_even = len({hosts.count(host) for host in hosts}) == 1
    assert len(way.hosts) == (len({*hosts}) if is_even else len(hosts))


def all_kinds(hosts: str, dtype: torch.dtype) -> tuple[float, list[Tensor]]:
    """Return the largest error, and the means, which must have the same bits on all ranks."""
    wire, worst, means = wire_on(hosts), 0.0, []
    rank, world = wire.rank, wire.world

    def off(found: Tensor, expected: Tensor) -> float:
        return (found.double() - expected).abs().max().item() if found.numel() else 0.0

    for numel in NUMELS:
        output = torch.full((world * numel,), torch.nan, dtype=dtype)
        wire.all_gather([output], [part(numel, rank, dtype)]).wait()
        assert torch.equal(output, torch.cat([part(numel, r, dtype) for r in range(world)]))
        for result in (dtype, torch.float64):
            output = torch.full((numel,), torch.nan, dtype=result)
            wire.reduce_scatter_mean(output, part(world * numel, rank, dtype)).wait()
            rows = [part(world * numel, r, dtype).double() for r in range(world)]
            worst = max(worst, off(output, torch.stack(rows).mean(0).view(world, -1)[rank]))
        values = part(numel, rank, dtype)
        wire.all_reduce_mean(values).wait()
        everyone = torch.stack([part(numel, r, dtype).double() for r in range(world)])
        worst = max(worst, off(values, everyone.mean(0)))
        means.append(values)
    return worst, means


@pytest.mark.parametrize(
    ("hosts", "dtype"),
    [
        *((hosts, torch.float64) for hosts in CLUSTERS),
        *(("aabb", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        ("ab", torch.bfloat16),
        ("aaab", torch.bfloat16),
    ],
)
def test_gathers_and_means(pool: RankPool, hosts: str, dtype: torch.dtype) -> None:
    allowed = {torch.float64: 1e-15, torch.float32: 3e-7, torch.bfloat16: 8e-3, torch.float16: 1e-3}
    results = pool.run(len(hosts), all_kinds, hosts, dtype)
    assert max(worst for worst, _ in results) <= allowed[dtype]
    for _, means in results[1:]:
        assert all(map(torch.equal, means, results[0][1]))


def schedulers(hosts: str) -> tuple[set[int], set[int]]:
    """Return the policies of the threads that new groups start, and of the training thread."""
    before = set(os.listdir("/proc/self/task"))
    wire_on(hosts)
    policies = set()
    for thread in set(os.listdir("/proc/self/task")) - before:
        with suppress(ProcessLookupError):
            policies.add(os.sched_getscheduler(int(thread)))
    return policies, {os.sched_getscheduler(0)}


def test_threads_of_exchanges_between_hosts_do_not_interrupt_training(pool: RankPool) -> None:
    for started, training in pool.run(4, schedulers, "aabb"):
        assert os.SCHED_BATCH in started and os.SCHED_BATCH not in training


def several_together(hosts: str) -> bool:
    """Gather several tensors from their places in the results, as units with several buffers do."""
    wire = wire_on(hosts)
    outputs = [torch.full((wire.world * numel,), torch.nan) for numel in NUMELS]
    own = [output.view(wire.world, -1)[wire.rank] for output in outputs]
    for place, numel in zip(own, NUMELS, strict=True):
        place.copy_(part(numel, wire.rank, torch.float32))
    wire.all_gather(outputs, own).wait()
    return all(
        torch.equal(output, torch.cat([part(numel, r, torch.float32) for r in range(wire.world)]))
        for output, numel in zip(outputs, NUMELS, strict=True)
    )


@every_cluster
def test_several_tensors_travel_together(pool: RankPool, hosts: str) -> None:
    assert pool.run(len(hosts), several_together, hosts) == [True] * len(hosts)


@on_ranks(3)
def test_complex_numbers_travel() -> None:
    wire = wire_on("aab")
    rank, world = wire.rank, wire.world
    everyone = [
        torch.complex(noise(6 * world, seed=r), noise(6 * world, seed=-r)) for r in range(world)
    ]
    gathered, mean = torch.empty(6 * world * world, dtype=everyone[0].dtype), everyone[rank].clone()
    wire.all_gather([gathered], [everyone[rank]]).wait()
    wire.all_reduce_mean(mean).wait()
    assert torch.equal(gathered, torch.cat(everyone))
    assert torch.allclose(mean, torch.stack(everyone).mean(0))


def random_programs(hosts: str, seed: int) -> float:
    with on(hosts), pytest.MonkeyPatch.context() as patched:
        group = dist.new_group()
        patched.setattr(shared, "world_group", lambda: group)
        worst = any_order_of_all_kinds(seed)
        # Unfinished sums that no rank waits for finish during other calls.
        assert gather(C10d(group, "cpu"))()
    check_way(group, hosts)
    return worst


@every_cluster
@pytest.mark.parametrize("seed", range(3))
def test_ranks_wait_in_any_order_or_never(pool: RankPool, hosts: str, seed: int) -> None:
    assert max(pool.run(len(hosts), random_programs, hosts, seed)) < 1e-14


def in_flight(hosts: str, count: int) -> None:
    """Start many gathers before the first wait."""
    wire = wire_on(hosts)
    started = [gather(wire, 10) for _ in range(count)]
    assert all(finish() for finish in started)
    assert gather(wire, 100_000)()


@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_any_number_may_be_in_flight(pool: RankPool, hosts: str) -> None:
    pool.run(len(hosts), in_flight, hosts, 500)


def large_ones_of_a_late_rank(hosts: str) -> bool:
    """Exchange more bytes than sockets hold; one rank starts late, and all ranks wait late."""
    wire = wire_on(hosts)
    if wire.rank == 0:
        time.sleep(0.3)
    numel = 600_000
    source = part(wire.world * numel, wire.rank, torch.float32)
    output = torch.empty(numel)
    reduction = wire.reduce_scatter_mean(output, source)
    finish = gather(wire, 500_000)
    dist.barrier()
    time.sleep(0.3)  # meanwhile the data is sent
    right = finish()
    reduction.wait()
    rows = [part(wire.world * numel, r, torch.float32) for r in range(wire.world)]
    mean = torch.stack(rows).double().mean(0).view(wire.world, -1)[wire.rank]
    return right and bool((output.double() - mean).abs().max() < 1e-6)


@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_large_exchanges_with_a_late_rank(pool: RankPool, hosts: str) -> None:
    assert pool.run(len(hosts), large_ones_of_a_late_rank, hosts) == [True] * len(hosts)


def sent_in(hosts: str, dtype: torch.dtype) -> list[int]:
    """Return the bytes that this rank sends to other hosts for a gather, a reduction and a mean."""
    wire, numel = wire_on(hosts), 1280
    num_hosts = len({*hosts})
    sent: list[int] = []

    def ones(rows: int) -> Tensor:
        return torch.ones(rows * numel, dtype=dtype)

    starts = (
        lambda: wire.all_gather([ones(wire.world)], [ones(1)]),
        lambda: wire.reduce_scatter_mean(ones(1), ones(wire.world)),
        lambda: wire.all_reduce_mean(ones(1)),
    )
    for start in starts:
        start().wait()  # compares labels
    broadcast, scatter = _collectives.broadcast, _collectives.scatter
    senders: dict[dist.ProcessGroup, int] = {}

    def count(group: dist.ProcessGroup, row: Tensor, root: int) -> None:
        assert group.size() == num_hosts
        assert senders.setdefault(group, root) == root  # two roots would send one after the other
        sent.append((num_hosts - 1) * row.nbytes if root == group.rank() else 0)

    def broadcasts(group: dist.ProcessGroup, values: Tensor, root: int) -> Any:
        count(group, values, root)
        return broadcast(group, values, root)

    def scatters(group: dist.ProcessGroup, row: Tensor, sources: list[Tensor], root: int) -> Any:
        count(group, row, root)
        assert len(sources) == (num_hosts if root == group.rank() else 0)
        return scatter(group, row, sources, root)

    counts = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_collectives, "broadcast", broadcasts)
        patched.setattr(_collectives, "scatter", scatters)
        for start in starts:
            start().wait()
            counts.append(sum(sent))
            sent.clear()
    return counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hosts", ["aabb", "abab", "ab"])
def test_bytes_between_hosts_are_those_of_two_levels(
    pool: RankPool, hosts: str, dtype: torch.dtype
) -> None:
    """A shard goes to the other host once; each rank gets one row of sums in fp32 from there."""
    counts = pool.run(len(hosts), sent_in, hosts, dtype)
    local = len(hosts) // 2
    for host in "ab":
        gathers, reductions, means = (
            sum(counts[rank][kind] for rank in range(len(hosts)) if hosts[rank] == host)
            for kind in range(3)
        )
        shard_nbytes = 1280 * dtype.itemsize
        row_nbytes = shard_nbytes if local == 1 else 1280 * 4
        assert gathers == local * (shard_nbytes + 64)
        assert reductions == local * (row_nbytes + 64)
        assert means == local * (row_nbytes // local + 64)  # one slice for each rank


@on_ranks(4)
def test_memory_is_used_again() -> None:
    wire = wire_on("aabb")
    for _ in range(40):
        assert gather(wire, 10_000)()
        wire.all_reduce_mean(noise(10_000, seed=1)).wait()
    way = way_of(wire.group, TransportRequest(Transport.SHARED))
    assert isinstance(way, TwoLevels)
    assert 512 * os.fstat(way.near._arena.memory._fd).st_blocks <= 16 * 8 * 10_000 + 65536


@on_ranks(4)
@pytest.mark.parametrize("kind", ["gather", "reduction", "mean"])
@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_a_rank_that_runs_another_collective_is_an_error_everywhere(hosts: str, kind: str) -> None:
    wire = wire_on(hosts)
    numel = 56 if wire.rank == 3 else 48
    values = torch.zeros(numel * wire.world)
    start = {
        "gather": lambda: wire.all_gather([values], [values[:numel]]),
        "reduction": lambda: wire.reduce_scatter_mean(values[:numel], values),
        "mean": lambda: wire.all_reduce_mean(values),
    }[kind]
    with pytest.raises(ProtocolError) as raised:
        start().wait()
    assert gather(wire)()  # the next exchange works
    said = str(raised.value)
    assert f"is for {kind} of float32" in said and "on this rank" in said


@on_ranks(4)
@pytest.mark.parametrize("kind", ["gather", "reduction", "mean"])
@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_another_order_on_another_host_is_an_error(hosts: str, kind: str) -> None:
    """Collectives of equal size that run in another order on another host are an error."""
    wire = wire_on(hosts)
    wires = [wire.labelled(Label(text)) for text in ("unit a", "unit b")]

    def start(one: C10d) -> Any:
        values = torch.ones(4 * 48)
        if kind == "gather":
            return one.all_gather([values], [values[:48]])
        return (
            one.all_reduce_mean(values)
            if kind == "mean"
            else one.reduce_scatter_mean(values[:48], values)
        )

    for one in (*wires, *wires):  # in the first round, the labels are new
        start(one).wait()
    if hosts[wire.rank] == "b":
        wires.reverse()
    said = refusal((ProtocolError, LostRankError), lambda: start(wires[0]).wait())
    assert "sent data of another collective; this" in said
    assert "for unit a" in said or "for unit b" in said


def a_rank_leaves(hosts: str, gone: int) -> str:
    wire = wire_on(hosts)
    assert gather(wire)() and gather(wire)()
    dist.barrier()
    if wire.rank == gone:
        dist.destroy_process_group()
        return ""
    with pytest.raises((LostRankError, RuntimeError)) as raised:
        gather(wire)()
    dist.destroy_process_group()
    return str(raised.value)


@pytest.mark.parametrize("hosts", ["ab", "aab", "aabb"])
def test_a_rank_that_is_gone_ends_the_waits_on_all_hosts(pool: RankPool, hosts: str) -> None:
    """A lost rank ends the waits of all ranks, without a watch."""
    found = pool.run(len(hosts), a_rank_leaves, hosts, len(hosts) - 1)
    if hosts == "aabb":
        assert "rank 3 of the process group is gone" in found[2]
        assert "a rank there is gone or silent" in found[1]


def a_rank_is_silent(hosts: str) -> None:
    wire = wire_on(hosts, timeout_s=1)
    assert gather(wire)()
    if wire.rank != 1:
        # Ranks of other hosts learn it from gloo, ranks of the same host by time-out.
        with pytest.raises(
            LostRankError if hosts == "aabb" else RuntimeError,
            match=r"exchange 1 \(|imed out|timeout|failed",
        ):
            gather(wire)()
    dist.barrier()


@pytest.mark.parametrize("hosts", ["aba", "aabb"])
def test_a_rank_that_is_silent_is_told_after_the_time_out(pool: RankPool, hosts: str) -> None:
    pool.run(len(hosts), a_rank_is_silent, hosts)


def without_memory_for_a_sum(kind: str, is_first: bool) -> str:
    """Fail once on rank 0 as it allocates memory for the sum of its host; return the error."""
    wire = wire_on("aabb", timeout_s=9)
    start: Any = {
        "reduction": lambda x: wire.reduce_scatter_mean(x[: len(x) // 4], x),
        "mean": wire.all_reduce_mean,
    }[kind]
    if not is_first:
        start(torch.ones(4000)).wait()

    def put_sum(*_: Any) -> None:
        raise MemoryError("no memory for a sum")

    said = ""
    with pytest.MonkeyPatch.context() as patched:
        if wire.rank == 0:
            patched.setattr(twolevel, "put_sum", put_sum)
        try:
            start(torch.ones(4000)).wait()
        except (MemoryError, LostRankError) as error:
            said = f"{type(error).__name__}: {error}"
        dist.barrier()
    values = torch.full((4000,), float(wire.rank))  # the next exchange works
    start(values).wait()
    assert values[0] == 1.5
    return said


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("kind", ["reduction", "mean"])
def test_a_rank_that_cannot_add_up_its_host_fails_alike_everywhere(
    pool: RankPool, kind: str, is_first: bool
) -> None:
    own, mate, column, other = pool.run(4, without_memory_for_a_sum, kind, is_first)
    assert own == "MemoryError: no memory for a sum"
    assert "LostRankError: rank 0 of the process group failed in" in column
    if kind == "mean":  # all ranks need the slice of rank 0
        assert "rank 0 of the process group failed" in mate
        assert "rank 2 of the process group failed" in other
    else:
        assert mate == other == ""


def without_a_start() -> str:
    """Fail to start a gather on rank 0; return the error."""
    wire = wire_on("aabb", timeout_s=3)
    assert gather(wire, 5)() and gather(wire, 5)()

    def broadcast(*_: Any) -> None:
        raise RuntimeError("no connection")

    with pytest.MonkeyPatch.context() as patched:
        if wire.rank == 0:
            patched.setattr(_collectives, "broadcast", broadcast)
        try:
            gather(wire, 5)()
        except (RuntimeError, LostRankError) as error:
            return str(error)
    return ""


def test_a_gather_that_does_not_start_fails_on_all_hosts(pool: RankPool) -> None:
    own, mate, *others = pool.run(4, without_a_start)
    assert "no connection" in own and "no connection" in mate
    assert "rank 0 of the process group failed" in mate
    assert all(others)  # after the time-out


def in_inference_mode(hosts: str) -> bool:
    """Begin one mean in inference mode, and finish another one there."""
    wire = wire_on(hosts)
    values = torch.full((7,), float(wire.rank))
    pending = wire.all_reduce_mean(values)
    with torch.inference_mode():
        own = torch.full((9,), float(wire.rank))
        wire.all_reduce_mean(own).wait()
    pending.wait()
    mean = (len(hosts) - 1) / 2
    return bool((values == mean).all() and (own == mean).all())


@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_means_in_inference_mode(pool: RankPool, hosts: str) -> None:
    assert pool.run(len(hosts), in_inference_mode, hosts) == [True] * len(hosts)


def dropped_sums(hosts: str) -> None:
    """Destroy groups while sums are in flight that no rank waits for."""
    for _ in range(3):
        wire = wire_on(hosts)
        for _ in range(4):
            wire.all_reduce_mean(torch.ones(50_000))
            wire.reduce_scatter_mean(torch.empty(1000), torch.ones(1000 * wire.world))
        dist.destroy_process_group(wire.group)
        del wire
        gc.collect()
    dist.barrier()


@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_a_group_may_end_while_sums_are_on_their_way(pool: RankPool, hosts: str) -> None:
    pool.run(len(hosts), dropped_sums, hosts)


def leave_at_once(hosts: str) -> bool:
    """Leave on rank 0, once it has its data, before the other ranks start to read."""
    wire = wire_on(hosts)
    finish = gather(wire, 300_000)
    if wire.rank > 0:
        time.sleep(0.3)
    right = finish()
    dist.destroy_process_group()
    return right


@pytest.mark.parametrize("hosts", ["aab", "aabb"])
def test_a_rank_that_has_what_it_needs_may_leave(pool: RankPool, hosts: str) -> None:
    assert pool.run(len(hosts), leave_at_once, hosts) == [True] * len(hosts)


def trains(hosts: str, face: str) -> float:
    """Train two steps; return the largest difference from the unsharded model."""
    plain = make()
    model: nn.Module = copy.deepcopy(plain)
    with on(hosts):
        if face == "flat":
            for i, block in enumerate(model.blocks):
                model.blocks[i] = FullyShardedDataParallel(block, use_orig_params=True)
            model = FullyShardedDataParallel(model, use_orig_params=True)
        elif face == "replicas":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
            shard(model, mesh=mesh)
        else:
            shard(model, **({"layout": Ragged()} if face == "ragged" else {}))
        for number in range(2):
            everyone = [batch(10 * number + rank) for rank in range(dist.get_world_size())]
            for one in (plain, model):
                x = torch.cat(everyone) if one is plain else everyone[dist.get_rank()]
                one(x).square().mean().backward()
            for one in (plain, model):
                with torch.no_grad():
                    for param in one.parameters():
                        if param.grad is not None:
                            param -= 0.1 * param.grad
                        param.grad = None
    with FullyShardedDataParallel.summon_full_params(model) if face == "flat" else nullcontext():
        found = [
            getattr(param, "full_tensor", param.detach().clone)() for param in model.parameters()
        ]
    differences = map(torch.sub, found, plain.parameters())
    return max(difference.abs().max().item() for difference in differences)


@pytest.mark.parametrize(
    ("hosts", "face"),
    [
        *((hosts, face) for hosts in ("ab", "aabb", "aaab") for face in ("dim", "ragged", "flat")),
        ("aabb", "replicas"),
        ("abab", "replicas"),
    ],
)
def test_steps_on_several_hosts_are_those_of_the_unsharded_model(
    pool: RankPool, hosts: str, face: str
) -> None:
    assert max(pool.run(len(hosts), trains, hosts, face)) <= 1e-12


def test_a_sandbox_may_refuse_to_tell_the_policy_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "sched_getscheduler", refuse)
    with columns._new_threads_never_preempt():
        pass
