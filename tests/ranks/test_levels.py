"""Exchanges among hosts: ranks of this machine that take each other for ranks of other hosts."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import FullyShardedDataParallel, Ragged
from fullshard.comm import C10d, crossing, links, meeting
from fullshard.comm.c10d import Transport, TransportRequest, ways_of
from fullshard.comm.levels import Levels
from fullshard.errors import LostRankError, PeerError, ProtocolError
from tests.ranks import test_shared
from tests.ranks.models import noise
from tests.ranks.net import batch, make, shard
from tests.ranks.pool import RankPool
from tests.ranks.test_comm import NUMELS, part
from tests.ranks.test_shared import any_order_of_all_kinds, gather

CLUSTERS = ("ab", "aabb", "aaab", "abac")
every_cluster = pytest.mark.parametrize("hosts", CLUSTERS)
"""The hosts of the ranks, a letter each."""


@contextmanager
def on(hosts: str) -> Iterator[None]:
    """Groups that meet in the block are on these hosts."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(meeting.HOST, hosts[dist.get_rank()])
        yield


def wire_on(hosts: str, timeout_s: float = 30) -> C10d:
    """The wire of a new group on these hosts."""
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    with on(hosts):
        wire = C10d(group, "cpu")
        wire.connect()
    levels_of(group)
    return wire


def levels_of(group: dist.ProcessGroup) -> Levels:
    way = ways_of(group, TransportRequest(Transport.SHARED)).gathers
    assert isinstance(way, Levels)
    return way


def all_kinds(hosts: str, dtype: torch.dtype) -> tuple[float, list[Tensor]]:
    """The largest error, and what must have the same bits on all ranks."""
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


def several_together(hosts: str) -> bool:
    """From where the result will be, as units with several buffers do."""
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


def complex_numbers(hosts: str) -> bool:
    wire = wire_on(hosts)
    rank, world = wire.rank, wire.world
    everyone = [
        torch.complex(noise(6 * world, seed=r), noise(6 * world, seed=-r)) for r in range(9)
    ]
    everyone = everyone[:world]
    gathered, mean = torch.empty(6 * world * world, dtype=everyone[0].dtype), everyone[rank].clone()
    wire.all_gather([gathered], [everyone[rank]]).wait()
    wire.all_reduce_mean(mean).wait()
    return torch.equal(gathered, torch.cat(everyone)) and torch.allclose(
        mean, torch.stack(everyone).mean(0)
    )


def test_complex_numbers_travel(pool: RankPool) -> None:
    assert pool.run(3, complex_numbers, "aab") == [True] * 3


def random_programs(hosts: str, seed: int) -> float:
    with on(hosts), pytest.MonkeyPatch.context() as patched:
        group = dist.new_group()
        patched.setattr(test_shared, "world_group", lambda: group)
        worst = any_order_of_all_kinds(seed)
    levels_of(group)
    return worst


@every_cluster
@pytest.mark.parametrize("seed", range(3))
def test_ranks_wait_in_any_order_or_never(pool: RankPool, hosts: str, seed: int) -> None:
    assert max(pool.run(len(hosts), random_programs, hosts, seed)) < 1e-14


def in_flight(hosts: str, count: int) -> None:
    """Many gathers, started before anybody waits."""
    wire = wire_on(hosts)
    started = [gather(wire, 10) for _ in range(count)]
    assert all(finish() for finish in started)
    assert gather(wire, 100_000)()


@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_any_number_may_be_in_flight(pool: RankPool, hosts: str) -> None:
    pool.run(len(hosts), in_flight, hosts, 500)


def large_ones_of_a_late_rank(hosts: str) -> bool:
    """More than sockets hold, while one rank starts late, and none waits for what it started."""
    wire = wire_on(hosts)
    if wire.rank == 0:
        time.sleep(0.3)
    numel = 600_000
    source = part(wire.world * numel, wire.rank, torch.float32)
    output = torch.empty(numel)
    reduction = wire.reduce_scatter_mean(output, source)
    finish = gather(wire, 500_000)
    dist.barrier()
    time.sleep(0.3)  # the bytes move meanwhile
    right = finish()
    reduction.wait()
    rows = [part(wire.world * numel, r, torch.float32) for r in range(wire.world)]
    mean = torch.stack(rows).double().mean(0).view(wire.world, -1)[wire.rank]
    return right and bool((output.double() - mean).abs().max() < 1e-6)


@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_large_exchanges_with_a_late_rank(pool: RankPool, hosts: str) -> None:
    assert pool.run(len(hosts), large_ones_of_a_late_rank, hosts) == [True] * len(hosts)


def sent_in(hosts: str, dtype: torch.dtype) -> list[int]:
    """Bytes that this rank sends to other hosts for a gather, a reduction and a mean."""
    wire, numel = wire_on(hosts), 1200
    sent: list[int] = []
    post = links.HostLink.post

    def counted(
        link: links.HostLink, number: int, subject: str, tensors: Sequence[Tensor], then: Any
    ) -> None:
        sent.append(sum(tensor.nbytes for tensor in tensors))
        post(link, number, subject, tensors, then)

    def ones(rows: int) -> Tensor:
        return torch.ones(rows * numel, dtype=dtype)

    starts = (
        lambda: wire.all_gather([ones(wire.world)], [ones(1)]),
        lambda: wire.reduce_scatter_mean(ones(1), ones(wire.world)),
        lambda: wire.all_reduce_mean(ones(1)),
    )
    counts = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(links.HostLink, "post", counted)
        for start in starts:
            start().wait()
            dist.barrier()  # all have what they need, so all was sent
            counts.append(sum(sent))
            sent.clear()
    return counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hosts", ["ab", "aabb", "aaab", "abac", "abcd"])
def test_bytes_between_hosts_are_those_of_two_levels(
    pool: RankPool, hosts: str, dtype: torch.dtype
) -> None:
    """A shard goes once to each other host; each rank gets one row from each other host."""
    counts = pool.run(len(hosts), sent_in, hosts, dtype)
    world, names, shard_nbytes = len(hosts), sorted({*hosts}), 1200 * dtype.itemsize
    for host in names:
        ranks = [rank for rank in range(world) if hosts[rank] == host]
        sums = 4 if len(ranks) > 1 else dtype.itemsize  # sums travel in fp32
        gathers, reductions, means = (
            sum(counts[rank][kind] for rank in ranks) for kind in range(3)
        )
        assert gathers == shard_nbytes * len(ranks) * (len(names) - 1)
        assert reductions == 1200 * sums * (world - len(ranks))
        slice_numel = 1200 // world
        slices = len(ranks) * (len(names) - 1) * dtype.itemsize
        assert means == slice_numel * (sums * (world - len(ranks)) + slices)


def memory_in_use(hosts: str) -> int:
    """Bytes of the file of this rank after many exchanges of one size."""
    wire = wire_on(hosts)
    for _ in range(40):
        assert gather(wire, 10_000)()
        wire.all_reduce_mean(noise(10_000, seed=1)).wait()
    shelf = levels_of(wire.group)._shelf
    return 0 if shelf is None else 512 * os.fstat(shelf.memory._fd).st_blocks


def test_memory_is_used_again(pool: RankPool) -> None:
    assert max(pool.run(4, memory_in_use, "aabb")) <= 16 * 8 * 10_000 + 65536


@pytest.mark.parametrize("hosts", ["ab", "aabb", "aaab"])
def test_a_rank_that_runs_another_collective_is_named_everywhere(
    pool: RankPool, hosts: str
) -> None:
    odd = len(hosts) - 1
    results = pool.run(len(hosts), different_sizes, hosts, odd)
    for rank, said in enumerate(results):
        assert "is a gather of float32" in said and "on this rank" in said
        if rank != odd:
            assert f"on rank {odd} of it" in said


def different_sizes(hosts: str, odd: int) -> str:
    wire = wire_on(hosts)
    numel = 56 if wire.rank == odd else 48
    pending = wire.all_gather([torch.zeros(numel * wire.world)], [torch.zeros(numel)])
    with pytest.raises(ProtocolError) as raised:
        pending.wait()
    assert gather(wire)()  # the next one is as good as ever
    return str(raised.value)


def different_reductions(hosts: str, odd: int, whole: bool) -> str:
    wire = wire_on(hosts)
    numel = 56 if wire.rank == odd else 48
    values = torch.zeros(numel * wire.world)
    start = wire.all_reduce_mean if whole else partial(wire.reduce_scatter_mean, values[:numel])
    with pytest.raises(ProtocolError) as raised:
        start(values).wait()
    assert gather(wire)()
    return str(raised.value)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("hosts", ["ab", "aabb", "aaab"])
def test_different_reductions_are_an_error_on_every_rank(
    pool: RankPool, hosts: str, whole: bool
) -> None:
    odd = len(hosts) - 1
    for said in pool.run(len(hosts), different_reductions, hosts, odd, whole):
        assert ("is a mean of" if whole else "is a reduction of") in said


def a_rank_leaves(hosts: str, gone: int) -> str:
    wire = wire_on(hosts)
    assert gather(wire)()
    dist.barrier()
    if wire.rank == gone:
        dist.destroy_process_group()
        return ""
    with pytest.raises(LostRankError) as raised:
        gather(wire)()
    dist.destroy_process_group()
    return str(raised.value)


@pytest.mark.parametrize("hosts", ["ab", "aab", "aabb"])
def test_a_rank_that_is_gone_is_named_on_all_hosts(pool: RankPool, hosts: str) -> None:
    gone = len(hosts) - 1
    found = pool.run(len(hosts), a_rank_leaves, hosts, gone)
    assert all(f"rank {gone} of the process group is gone" in said for said in found[:gone])


def a_rank_is_silent(hosts: str) -> None:
    wire = wire_on(hosts, timeout_s=1)
    assert gather(wire)()
    if wire.rank != 1:
        with pytest.raises(
            LostRankError, match=r"rank 1 .* sent nothing for 1 s.*collective 1, a gather"
        ):
            gather(wire)()
    dist.barrier()


@pytest.mark.parametrize("hosts", ["aba", "aab"])
def test_a_rank_that_is_silent_is_told_after_the_time_out(pool: RankPool, hosts: str) -> None:
    pool.run(3, a_rank_is_silent, hosts)


def without_memory_for_a_sum() -> str:
    """Rank 0, which adds up for rank 2, has no memory for it in the thread that carries on."""
    wire, struck = wire_on("aab", timeout_s=4), threading.Event()

    def put_sum(*_: Any) -> None:
        assert threading.current_thread().name == "fullshard-courier"
        struck.set()
        raise MemoryError("no memory for a sum")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(crossing, "put_sum", put_sum)
        if wire.rank > 0:
            dist.barrier()
        output = torch.empty(1000)
        pending = wire.reduce_scatter_mean(output, torch.ones(3000))
        if wire.rank == 0:
            dist.barrier()
            assert struck.wait(30)
        said = ""
        if wire.rank != 1:  # which has all it needs
            with pytest.raises(PeerError if wire.rank else ProtocolError) as raised:
                pending.wait()
            said = str(raised.value)
    dist.barrier()
    with pytest.raises(ProtocolError if wire.rank == 0 else LostRankError):
        gather(wire)()
    return said


def test_an_exception_in_the_thread_that_carries_on_is_told_to_all(pool: RankPool) -> None:
    own, _, other = pool.run(3, without_memory_for_a_sum)
    assert "an exception ended the exchanges of this rank" in own
    assert "MemoryError: no memory for a sum" in own
    assert "rank 0 of the process group is gone: its exchanges failed with MemoryError" in other


def once_no_thread_starts() -> bool:
    """Rank 0 can start no thread once; then it has to carry on for others, who wait first."""
    wire = wire_on("aab", timeout_s=4)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if wire.rank == 0:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                gather(wire)
        finish = gather(wire)
        dist.barrier()
        dist.barrier()
        return finish()
    dist.barrier()
    gather(wire)
    right = gather(wire)()
    dist.barrier()
    return right


def test_a_thread_that_did_not_start_is_tried_again(pool: RankPool) -> None:
    assert pool.run(3, once_no_thread_starts) == [True] * 3


def leave_at_once(hosts: str) -> bool:
    """Rank 0 is gone, having what it needs, when the others start to read."""
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
    """Two steps on each rank's own batch; how far the parameters are from the unsharded model's."""
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
