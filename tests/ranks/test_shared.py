"""Exchanges through shared memory: lost ranks, time-outs, different calls and memory use."""

from __future__ import annotations

import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.comm import C10d, Pending, all_to_all
from fullshard.comm.c10d import Transport, TransportRequest, way_of
from fullshard.comm.memory import Memory
from fullshard.comm.shared import Shared
from fullshard.errors import LostRankError, ProtocolError
from tests.kit.shared import any_order_of_all_kinds, gather, permissions_at, world_group
from tests.ranks.models import noise, shard_units
from tests.ranks.pool import RankPool, every_world, on_ranks


def shared(group: dist.ProcessGroup) -> Shared:
    way = way_of(group, TransportRequest(Transport.SHARED))
    assert isinstance(way, Shared)
    return way


def long_timeout(hosts: str) -> bool:
    """Gather in a group with a time-out of a year, on ranks that arrive at different times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_HOST", hosts[dist.get_rank()])
        group = dist.new_group(timeout=timedelta(days=365))
        assert isinstance(group, dist.ProcessGroup)
        wire = C10d(group, "cpu")
        if dist.get_rank():
            time.sleep(0.3)
        return gather(wire)()


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_group_may_wait_for_a_year(pool: RankPool, hosts: str) -> None:
    assert pool.run(2, long_timeout, hosts) == [True] * 2


def nbytes_of(memory: Memory) -> int:
    """Return the bytes of the file that are in memory."""
    return 512 * os.fstat(memory._fd).st_blocks


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("seed", range(3))
def test_any_order_and_size_in_little_memory(seed: int) -> None:
    draw = random.Random(seed)  # the same on all ranks
    wire = C10d(world_group(), "cpu")
    in_flight: list[Callable[[], bool]] = []
    for _ in range(150):
        in_flight.append(gather(wire, draw.choice([0, 1, 3, 64, 1000, 70_001])))
        if len(in_flight) == 3:
            assert in_flight.pop(draw.randrange(3))()
    assert all(finish() for finish in in_flight)
    # Three exchanges of this rank are in flight, and a neighbor has not confirmed three others yet.
    assert nbytes_of(shared(world_group())._arena.memory) <= 7 * 8 * 70_001 + 65536


def sent(source: int, target: int, number: int) -> Tensor:
    """Return the bytes that one rank sends another in an exchange, sometimes none."""
    draw = random.Random(f"{source} {target} {number}")
    size = draw.choice([0, 1, 17, 1000, 70_001])
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(size + number))


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("wire", ["1", "0"])
def test_slices_of_an_exchange_may_have_any_size(world: int, wire: str) -> None:
    """Bytes of many sizes are exchanged while gathers are in flight."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_SHARED_MEMORY", wire)
        group = dist.new_group()
        rank, world = dist.get_rank(), dist.get_world_size()
        for number in range(12):
            finish = gather(C10d(group, "cpu"))
            mine = [sent(rank, other, number).to(torch.uint8) for other in range(world)]
            theirs = [sent(other, rank, number).to(torch.uint8) for other in range(world)]
            sizes = list(map(len, theirs))
            found = all_to_all(torch.cat(mine), list(map(len, mine)), sizes, group)
            assert torch.equal(found, torch.cat(theirs))
            assert finish()
        dist.destroy_process_group(group)


def unlike_splits() -> str:
    """Exchange bytes with ranks that disagree on the sizes."""
    group = dist.new_group()
    lengths = [3, 3] if dist.get_rank() == 0 else [2, 3]
    said = ""
    try:
        all_to_all(torch.zeros(sum(lengths), dtype=torch.uint8), lengths, [3, 3], group)
    except ProtocolError as error:
        said = str(error)
    dist.barrier()
    dist.destroy_process_group(group)
    return said


def test_sizes_that_differ_between_ranks_are_told(pool: RankPool) -> None:
    first, second = pool.run(2, unlike_splits)
    assert "rank 1 of the process group sent 2 bytes to rank 0, which expected 3" in first
    assert second == ""


@on_ranks(2)
def test_what_nobody_waits_for_takes_no_memory_for_long() -> None:
    wire = C10d(world_group(), "cpu")
    for _ in range(50):
        gather(wire, 10_000)
        assert gather(wire, 10_000)()
    assert nbytes_of(shared(world_group())._arena.memory) <= 5 * 8 * 10_000 + 65536
    for neighbour in shared(world_group()).peers.by_rank.values():
        assert len(neighbour._arrived) + len(neighbour._unwanted) <= 3


@on_ranks(2)
def test_if_nobody_waits_at_all_memory_is_used_again() -> None:
    group = dist.new_group()  # the default group's memory has been used before
    wire = C10d(group, "cpu")
    for number in range(4000):
        gather(wire, 10)
        if number % 50 == 0:
            dist.barrier()
    assert gather(wire, 10)()
    # Each gather was dropped at once, and the other rank noticed when it looked for memory. All
    # gathers together would take twice as much.
    assert nbytes_of(shared(group)._arena.memory) <= 4000 * 128 // 2
    dist.destroy_process_group(group)


@on_ranks(2)
def test_a_rank_that_is_gone_is_told_at_once() -> None:
    wire = C10d(world_group(), "cpu")
    assert gather(wire)()
    if wire.rank == 1:
        dist.destroy_process_group()
        return
    with pytest.raises(LostRankError, match="rank 1 of the process group is gone"):
        gather(wire)()
    dist.destroy_process_group()


@on_ranks(3)
def test_a_rank_that_is_silent_is_told_after_the_time_out() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    wire = C10d(group, "cpu")
    assert gather(wire)()
    if wire.rank != 1:
        with pytest.raises(
            LostRankError, match=r"rank 1 .* sent nothing for 1 s.*exchange 1 \(gather"
        ):
            gather(wire)()
    dist.barrier()


def different_sizes() -> None:
    wire = C10d(dist.new_group(), "cpu")
    finish = gather(wire, 1000 + 8 * wire.rank)
    with pytest.raises(
        ProtocolError, match=r"exchange 0 .* runs gather of float64, \d+ bytes; this rank"
    ):
        finish()
    assert gather(wire)()  # the next exchange works


def different_kinds() -> None:
    wire = C10d(dist.new_group(), "cpu")
    if wire.rank == 0:
        pending = wire.all_gather([torch.zeros(144)], [torch.zeros(48)])  # the same number of bytes
    else:
        pending = wire.reduce_scatter_mean(torch.zeros(8), torch.zeros(24))
    with pytest.raises(ProtocolError, match=r"runs (gather|reduction) .* runs (gather|reduction) "):
        pending.wait()
    assert gather(wire)()


@pytest.mark.parametrize("differ", [different_sizes, different_kinds])
def test_different_collectives_are_an_error_on_every_rank(
    pool: RankPool, differ: Callable[[], None]
) -> None:
    pool.run(3, differ)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@on_ranks(2)
def test_all_is_closed_with_the_group() -> None:
    group = dist.new_group()
    gather(C10d(group, "cpu", Transport.NATIVE))()  # gloo opens its own files
    before = open_files()
    wire = C10d(group, "cpu")
    for numel in (10, 1000, 100_000):
        assert gather(wire, numel)()
    assert open_files() > before
    dist.destroy_process_group(group)
    del group
    assert open_files() <= before
    dist.barrier()


@on_ranks(2)
def test_inference_mode_leaves_memory_writable() -> None:
    wire = C10d(world_group(), "cpu")
    with torch.inference_mode():
        assert gather(wire)()
    assert gather(wire)()
    model = fully_shard(torch.nn.Linear(8, 8))
    with torch.inference_mode():
        model(torch.ones(2, 8))
    model(torch.ones(2, 8)).sum().backward()


@on_ranks(3)
def test_ranks_can_read_each_others_memory_only() -> None:
    wire = C10d(world_group(), "cpu")
    assert gather(wire)()
    way = shared(world_group())
    for neighbour in way.peers.by_rank.values():
        theirs = neighbour._memory
        for forbidden in (
            partial(os.write, theirs._fd, b"x"),
            partial(os.ftruncate, theirs._fd, 0),
            partial(mmap.mmap, theirs._fd, 8, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE),
        ):
            with pytest.raises(OSError, match=r"Bad file descriptor|Invalid argument|denied"):
                forbidden()
        assert os.fstat(theirs._fd).st_mode & 0o777 == 0o600
        assert permissions_at(theirs.read(0, 8).data_ptr()) == ["r--s"]


@on_ranks(3)
@pytest.mark.parametrize("count", [70, 500, 3000])
def test_any_number_may_be_in_flight(count: int) -> None:
    wire = C10d(dist.new_group(timeout=timedelta(seconds=20)), "cpu")
    assert gather(wire)()
    before = open_files()
    in_flight = [gather(wire, 10) for _ in range(count)]
    dist.barrier()  # no rank has read a notice yet
    assert all(finish() for finish in in_flight)
    assert open_files() == before


@on_ranks(3)
def test_a_rank_may_leave_before_others_read() -> None:
    wire = C10d(world_group(), "cpu")
    in_flight = [gather(wire, numel) for numel in (100_000, *[10] * 1000)]
    if wire.rank > 0:
        time.sleep(0.5)
    right = all(finish() for finish in in_flight)
    dist.destroy_process_group()
    assert right


@on_ranks(3)
def test_a_rank_that_is_gone_is_told_when_much_is_in_flight() -> None:
    wire = C10d(world_group(), "cpu")
    assert gather(wire)()
    if wire.rank == 1:
        dist.destroy_process_group()
        return
    in_flight = [gather(wire) for _ in range(1000)]
    with pytest.raises(LostRankError, match="rank 1 of the process group is gone"):
        in_flight.pop()()
    dist.destroy_process_group()


@on_ranks(2)
@pytest.mark.parametrize("face", ["unshard", "prefetch", "flat"])
def test_any_number_of_units_may_be_gathered_at_once(face: str) -> None:
    layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(100)]
    model = torch.nn.Sequential(*layers)
    if face == "flat":
        wrap = partial(FullyShardedDataParallel, limit_all_gathers=False)
        model = wrap(torch.nn.Sequential(*map(wrap, layers)))
    else:
        shard_units(model, layers)
        model.set_prefetch_budget(sys.maxsize)
        if face == "unshard":
            handles = [layer.unshard(async_op=True) for layer in layers]
            for handle in reversed(handles):
                handle.wait()
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


@on_ranks(2, 3, 4)
def test_means_are_right_in_whatever_order_ranks_wait() -> None:
    """The buffer of a mean that rank 0 waits for late keeps its values until then."""
    wire = C10d(world_group(), "cpu")

    def values(number: int, rank: int) -> Tensor:
        return noise(1000, seed=10 * number + rank)

    def started(number: int) -> tuple[Pending, Tensor]:
        mine = values(number, wire.rank)
        return wire.all_reduce_mean(mine), mine

    first, second = started(1), started(2)
    order = [first, second] if wire.rank else [second]
    for pending, _ in order:
        pending.wait()
    third, fourth = started(3), started(4)
    if wire.rank == 0:
        fourth[0].wait()  # tells rank 0 that all other ranks have read the first mean
        fifth, sixth = started(5), started(6)
        order = [third, first]
    else:
        fifth, sixth = started(5), started(6)
        order = [third, fourth]
    for pending, _ in [*order, fifth, sixth]:
        pending.wait()
    worst = 0.0
    for number, (_, found) in enumerate([first, second, third, fourth, fifth, sixth], 1):
        everyone = torch.stack([values(number, rank) for rank in range(wire.world)])
        worst = max(worst, (found - everyone.mean(0)).abs().max().item())
    assert worst < 1e-14


@every_world
@pytest.mark.parametrize("seed", range(3))
def test_ranks_wait_in_any_order_or_never(pool: RankPool, world: int, seed: int) -> None:
    assert max(pool.run(world, any_order_of_all_kinds, seed)) < 1e-14
