"""Exchanges through shared memory: what ends, hangs, differs or is dropped; who may take part."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import fully_shard
from fullshard.comm import C10d, neighbours
from fullshard.comm.c10d import Transport, _way
from fullshard.comm.pairs import Pairs
from fullshard.comm.shared import Shared
from fullshard.errors import LostRankError, ProtocolError
from tests.ranks.models import noise
from tests.ranks.pool import RankPool, every_world


def world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def shared(group: dist.ProcessGroup) -> Shared:
    way = _way(group, Transport.SHARED)
    assert isinstance(way, Shared)
    return way


def gathered(numel: int) -> Tensor:
    return torch.cat([noise(numel, seed=rank) for rank in range(dist.get_world_size())])


def gather(wire: C10d, numel: int = 1000) -> Callable[[], bool]:
    """Start a gather; what is returned waits, and says whether the result is right."""
    output = torch.full((wire.world * numel,), torch.nan, dtype=torch.float64)
    pending = wire.all_gather([output], [noise(numel, seed=wire.rank)])

    def finish() -> bool:
        pending.wait()
        return torch.equal(output, gathered(numel))

    return finish


def many_sizes_in_any_order(seed: int) -> None:
    draw = random.Random(seed)  # the same on all ranks
    wire = C10d(world_group(), "cpu")
    in_flight: list[Callable[[], bool]] = []
    for _ in range(150):
        in_flight.append(gather(wire, draw.choice([0, 1, 3, 64, 1000, 70_001])))
        if len(in_flight) == 3:
            assert in_flight.pop(draw.randrange(3))()
    assert all(finish() for finish in in_flight)
    slots = shared(world_group())._slots
    # Three of our own in flight, and as many that a neighbour has not told us the end of.
    assert len(slots) <= 7
    assert max(slot.memory.bytes.numel() for slot in slots) <= 8 * 70_001 + 64


@every_world
@pytest.mark.parametrize("seed", range(3))
def test_any_order_and_size_in_few_slots(pool: RankPool, world: int, seed: int) -> None:
    pool.run(world, many_sizes_in_any_order, seed)


def nobody_waits() -> None:
    wire = C10d(world_group(), "cpu")
    for _ in range(50):
        gather(wire)
        assert gather(wire)()
    assert len(shared(world_group())._slots) <= 4


def test_what_nobody_waits_for_takes_no_memory_for_long(pool: RankPool) -> None:
    pool.run(2, nobody_waits)


def leave_at_once() -> bool:
    """Rank 0 is gone when the others start to read."""
    wire = C10d(world_group(), "cpu")
    finish = gather(wire, 100_000)
    if wire.rank > 0:
        time.sleep(0.3)
    right = finish()
    dist.destroy_process_group()
    return right


def test_a_rank_that_has_what_it_needs_may_leave(pool: RankPool) -> None:
    assert pool.run(3, leave_at_once) == [True] * 3


def a_rank_leaves() -> None:
    wire = C10d(world_group(), "cpu")
    assert gather(wire)()
    if wire.rank == 1:
        dist.destroy_process_group()
        return
    with pytest.raises(LostRankError, match="rank 1 of the process group is gone"):
        gather(wire)()
    dist.destroy_process_group()


def test_a_rank_that_is_gone_is_told_at_once(pool: RankPool) -> None:
    pool.run(2, a_rank_leaves)


def a_rank_is_silent() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    wire = C10d(group, "cpu")
    assert gather(wire)()
    if wire.rank != 1:
        with pytest.raises(LostRankError, match=r"rank 1 .* sent nothing for 1 s"):
            gather(wire)()
    dist.barrier()


def test_a_rank_that_is_silent_is_told_after_the_time_out(pool: RankPool) -> None:
    pool.run(3, a_rank_is_silent)


def different_sizes() -> None:
    wire = C10d(dist.new_group(), "cpu")
    finish = gather(wire, 1000 + 8 * wire.rank)
    with pytest.raises(ProtocolError, match=r"collective 0 .* is a gather of \d+ bytes on rank \d"):
        finish()
    assert gather(wire)()  # the next one is as good as ever


def different_kinds() -> None:
    wire = C10d(dist.new_group(), "cpu")
    if wire.rank == 0:
        pending = wire.all_gather([torch.zeros(144)], [torch.zeros(48)])  # as many bytes
    else:
        pending = wire.reduce_scatter_mean(torch.zeros(8), torch.zeros(24))
    with pytest.raises(ProtocolError, match=r"is a (gather|reduction) of .* a (gather|reduction)"):
        pending.wait()
    assert gather(wire)()


@pytest.mark.parametrize("differ", [different_sizes, different_kinds])
def test_different_collectives_are_an_error_on_every_rank(
    pool: RankPool, differ: Callable[[], None]
) -> None:
    pool.run(3, differ)


def reach(how: str) -> str:
    """What is used if rank 1 cannot, or must not."""
    group, patch = dist.new_group(), pytest.MonkeyPatch()  # the default one may have met
    with patch.context() as patched:
        patched.setattr(neighbours, "_MEET_TIMEOUT_S", 0.5 if how == "no calls" else 10.0)
        if group.rank() == 1 and how == "another host":
            patched.setattr(neighbours, "_host", lambda: b"x" * neighbours._TOKEN_NBYTES)
        elif group.rank() == 1 and how == "not allowed":
            patched.setenv(neighbours.SWITCH, "0")
        elif group.rank() == 1 and how == "no such system":
            patched.delattr(os, "memfd_create")
        elif group.rank() == 1 and how == "no calls":
            patched.setattr(socket.socket, "connect", _refuse)
        assert gather(C10d(group, "cpu"))()
    return type(_way(group, Transport.SHARED)).__name__


def _refuse(*_: object) -> None:
    raise PermissionError("not here")


@pytest.mark.parametrize("how", ["another host", "not allowed", "no such system", "no calls"])
def test_if_one_rank_cannot_gloo_carries_everything(pool: RankPool, how: str) -> None:
    assert pool.run(3, reach, how) == [Pairs.__name__] * 3


def test_else_memory_is_shared(pool: RankPool) -> None:
    assert pool.run(3, reach, "") == [Shared.__name__] * 3


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def nothing_is_left() -> None:
    group = dist.new_group()
    gather(C10d(group, "cpu", Transport.PAIRS))()  # gloo opens files of its own
    before = open_files()
    wire = C10d(group, "cpu")
    for numel in (10, 1000, 100_000):
        assert gather(wire, numel)()
    assert open_files() > before
    dist.destroy_process_group(group)
    del group
    assert open_files() <= before
    dist.barrier()


def test_all_is_closed_with_the_group(pool: RankPool) -> None:
    pool.run(2, nothing_is_left)


def inference_first() -> None:
    wire = C10d(world_group(), "cpu")
    with torch.inference_mode():
        assert gather(wire)()
    assert gather(wire)()
    model = fully_shard(torch.nn.Linear(8, 8))
    with torch.inference_mode():
        model(torch.ones(2, 8))
    model(torch.ones(2, 8)).sum().backward()


def test_inference_mode_leaves_memory_writable(pool: RankPool) -> None:
    pool.run(2, inference_first)


def test_a_stranger_that_calls_is_not_answered() -> None:
    tokens = [b"a" * 16, b"b" * 16]
    with (
        socket.socket(socket.AF_UNIX) as listening,
        socket.socket(socket.AF_UNIX) as stranger,
        socket.socket(socket.AF_UNIX) as peer,
    ):
        assert neighbours._listen(listening, tokens[0])
        for calling, says in ((stranger, b"?" * 16), (peer, tokens[1])):
            calling.connect(neighbours._name(tokens[0]))
            calling.sendall(says)
        connections = neighbours._connected(0, tokens, listening)
        assert connections is not None
        with connections[1] as answered:
            peer.sendall(b"it is me")
            assert answered.recv(8) == b"it is me"
        stranger.settimeout(5)
        assert stranger.recv(1) == b""
