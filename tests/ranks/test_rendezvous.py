"""Ranks meet to exchange through shared memory, and keep other processes out."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import fully_shard
from fullshard.comm import C10d, handshake, rendezvous
from fullshard.comm.c10d import Transport, TransportRequest, way_of
from fullshard.comm.handshake import Handshake, PeerInfo, address, listen
from fullshard.comm.memory import Memory
from fullshard.comm.native import Native
from fullshard.comm.shared import Shared
from fullshard.comm.twolevel import TwoLevels
from fullshard.errors import ConfigError
from tests.kit.shared import gather
from tests.ranks.pool import RankPool, on_ranks


def reach(how: str) -> str:
    """Return the transport in use if rank 1 cannot share memory, or is not allowed to."""
    group, patch = dist.new_group(), pytest.MonkeyPatch()  # the default group may be connected
    with patch.context() as patched:
        patched.setattr(handshake, "_TIMEOUT_S", 0.5 if how.startswith("no calls") else 10.0)
        if group.rank() == 1 and how == "another host":
            patched.setenv(rendezvous.HOST, "x")
        elif group.rank() == 1 and how == "not allowed":
            patched.setenv(rendezvous.SWITCH, "0")
        elif group.rank() == 1 and how == "no such system":
            patched.delattr(os, "memfd_create")
        elif group.rank() == 1 and how == "no calls":
            patched.setattr(Handshake, "_connected", _refuse)
        assert gather(C10d(group, "cpu"))()
    way = way_of(group, TransportRequest(Transport.SHARED))
    return type(way).__name__


def _refuse(*_: object) -> None:
    raise PermissionError("not here")


@pytest.mark.parametrize(
    ("how", "way"),
    [
        ("another host", TwoLevels),
        ("no calls", TwoLevels),
        ("not allowed", TwoLevels),
        ("no such system", Native),
    ],
)
def test_if_a_rank_cannot_share_memory_gloo_carries_everything(
    pool: RankPool, how: str, way: type
) -> None:
    assert pool.run(3, reach, how) == [way.__name__] * 3


def first_step_unconnected() -> str:
    """Train a step on ranks that cannot connect, which they notice after their time-out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "_TIMEOUT_S", 3.0)
        patch.setenv("FULLSHARD_PATIENCE_S", "0.5")
        patch.setattr(Handshake, "_connected", _refuse)
        mesh = DeviceMesh("cpu", range(dist.get_world_size()))
        model = fully_shard(nn.Linear(6, 6), mesh=mesh)
        model(torch.ones(2, 6)).sum().backward()
        return type(way_of(mesh.get_group(), TransportRequest(Transport.SHARED))).__name__


def test_a_first_step_outlasts_vain_attempts_to_connect(pool: RankPool) -> None:
    assert pool.run(3, first_step_unconnected) == [TwoLevels.__name__] * 3


@on_ranks(3)
@pytest.mark.parametrize(
    ("own", "found"), [("backend", Native), ("auto", Shared), ("shared", Shared)]
)
def test_one_rank_may_ask_for_the_backends_own_collectives(own: str, found: type) -> None:
    """All ranks use the transport that rank 1 asks for, and sum bf16 in a wider dtype."""
    group = dist.new_group()
    with pytest.MonkeyPatch.context() as patched:
        if group.rank() == 1:
            patched.setenv(rendezvous.TRANSPORT, own)
        wire = C10d(group, "cpu")
        assert wire.adds_wide
        assert gather(wire)()
    parts = torch.arange(3 * 4 * group.size()).view(group.size(), -1).remainder(7) / 64 + 1
    exact = parts.bfloat16().double().mean(0)
    own_part = parts[group.rank()].bfloat16()
    reduced, whole = torch.empty(3 * 4 // group.size()), own_part.clone()
    wire.reduce_scatter_mean(reduced, own_part).wait()
    wire.all_reduce_mean(whole).wait()
    wanted = exact.view(group.size(), -1)[group.rank()]
    rounded = exact.bfloat16().double()
    off = (reduced.double() - wanted).abs().max() + (whole.double() - rounded).abs().max()
    assert type(way_of(group, TransportRequest(Transport.SHARED))) is found
    assert off < 1e-6  # sums in bf16 would be off by some thousandths


def refused_wish(own: str, *off: str) -> str:
    group = dist.new_group()
    with pytest.MonkeyPatch.context() as patched:
        if group.rank() == 1:
            patched.setenv(rendezvous.TRANSPORT, own)
            for name in off:
                patched.setenv(name, "0")
        with pytest.raises(ConfigError) as raised:
            way_of(group, TransportRequest(Transport.SHARED))
    assert gather(C10d(group, "cpu"))()  # the group still works
    return str(raised.value)


def test_an_unknown_transport_is_refused_on_all_ranks(pool: RankPool) -> None:
    for said in pool.run(3, refused_wish, "tcp"):
        assert "FULLSHARD_TRANSPORT='tcp' on rank 1 of the process group" in said
        assert "expected one of auto, shared, backend" in said


def test_memory_that_must_be_shared_and_cannot_is_refused_on_all_ranks(pool: RankPool) -> None:
    for said in pool.run(3, refused_wish, "shared", rendezvous.SWITCH):
        assert "ranks 0, 1, 2 of the process group are on one host" in said
        assert "Set FULLSHARD_TRANSPORT=auto to let such ranks exchange by gloo" in said


def some_handshakes(world: int) -> Iterator[tuple[Handshake, socket.socket]]:
    """Yield the handshakes of ranks that share a process, before any rank has connected."""
    names = [bytes([rank]) * 16 for rank in range(world)]
    told = [PeerInfo(b"", name, secrets.token_bytes(16), b"", "") for name in names]
    for rank in range(world):
        listening = socket.socket(socket.AF_UNIX)
        assert listen(listening, names[rank])
        memory = Memory()
        memory.grow(1)
        yield Handshake(rank, told, set(range(world)) - {rank}, memory), listening


def test_programs_that_a_rank_starts_do_not_keep_the_memory_of_others() -> None:
    both = list(some_handshakes(2))
    assert met(both) == [True] * 2
    calls = [call for one, _ in both for call in one.taken().values()]
    keeps = os.system("ls -l /proc/self/fd | grep memfd:fullshard") == 0
    inherited = [os.get_inheritable(call.fd) for call in calls]
    for call in calls:
        call.close()
    for _, listening in both:
        listening.close()
    assert not keeps and inherited == [False] * 2


def called(rank: int) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(address(bytes([rank]) * 16))
    return stranger


def met(both: Sequence[tuple[Handshake, socket.socket]]) -> list[bool]:
    with ThreadPoolExecutor(len(both)) as threads:
        return list(threads.map(lambda one: one[0].meet_all(one[1], lambda: None), both))


def test_strangers_of_the_same_user_stall_nobody_and_get_no_memory() -> None:
    """A stranger that claims to be a rank gets a nonce and a useless proof, but no memory."""
    both = list(some_handshakes(3))
    fd = os.open("/dev/null", os.O_RDONLY)
    strangers = []
    for rank in range(3):
        silent = [called(rank) for _ in range(300)]
        garbage, short = called(rank), called(rank)
        garbage.sendall(b"?" * 10_000)
        short.sendall(b"?" * 3)
        called(rank).close()
        strangers += [*silent, garbage, short]
        for claimed in (-1, *range(4), 1 << 30):
            hello = struct.pack("=i16s", claimed, b"n" * 16)
            without_proof, wrong, early = called(rank), called(rank), called(rank)
            without_proof.sendall(hello)
            wrong.sendall(hello + b"k" * 16)
            socket.send_fds(wrong, [b"."], [fd])
            socket.send_fds(early, [hello + b"k" * 16], [fd])
            strangers += [without_proof, wrong, early]
    os.close(fd)
    assert met(both) == [True] * 3
    for one, listening in both:
        for call in one.taken().values():
            call.close()
        one.close()
        listening.close()
    for stranger in strangers:
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            said, fds, *_ = socket.recv_fds(stranger, 1000, 1)
            assert len(said) in (0, 36) and not fds
            assert not said or stranger.recv(1) == b""
        stranger.close()


def test_a_peer_gets_no_memory_before_it_has_proved_itself() -> None:
    """A rank sends no memory to a process that has taken the address of a dead rank."""
    (_, own), (caller, listening) = some_handshakes(2)
    own.setblocking(True)
    own.settimeout(5)
    with ThreadPoolExecutor(1) as thread, pytest.MonkeyPatch.context() as patched:
        patched.setattr(handshake, "_TIMEOUT_S", 2.0)
        has_met = thread.submit(caller.meet_all, listening, lambda: None)
        call = own.accept()[0]
        call.settimeout(5)
        assert struct.unpack("=i16s", call.recv(1000))[0] == 1
        call.sendall(struct.pack("=i16s", 0, b"n" * 16))
        said, fds, *_ = socket.recv_fds(call, 1000, 1)
        assert len(said) == 16 and not fds  # the caller's proof
        call.sendall(said)  # a copy proves nothing
        said, fds, *_ = socket.recv_fds(call, 1000, 1)
        assert not said and not fds
        assert not has_met.result()
    for end in (own, call, listening):
        end.close()
    caller.close()


@on_ranks(3)
def test_versions_that_cannot_connect_are_refused_on_all_ranks() -> None:
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(handshake, "VERSION", 7)
        with pytest.raises(ConfigError) as raised:
            way_of(dist.new_group(), TransportRequest(Transport.SHARED))
    said = str(raised.value)
    assert "ranks 0, 2 version 1 of the protocol, rank 1 version 7" in said
    assert "install the same version on all hosts" in said


def test_other_users_are_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks refuse connections of another user, both as callers and as listeners."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(handshake, "_TIMEOUT_S", 0.2)
    both = list(some_handshakes(2))
    assert met(both) == [False] * 2
    for one, listening in both:
        assert not one._calls
        one.close()
        listening.close()


ATTACK = """
import os, socket, sys, time
os.setgid(65534)
os.setuid(65534)
end = time.monotonic() + float(sys.argv[1])
calls, seen, got = [], set(), 0
print("ready", flush=True)
while time.monotonic() < end:
    for line in open("/proc/net/unix"):
        name = line.split()[-1]
        if not name.startswith("@fullshard-"):
            continue
        seen.add(name)
        for say in (b"", bytes(20), bytes.fromhex(name[-32:]) + bytes(4)):
            try:
                call = socket.socket(socket.AF_UNIX)
                call.setblocking(False)
                call.connect(b"\\0" + name[1:].encode())
                if say:
                    call.sendall(say)
                calls.append(call)
            except OSError:
                call.close()
    for call in calls[-200:]:
        try:
            data, fds, *_ = socket.recv_fds(call, 64, 4)
            got += len(data) + len(fds)
        except OSError:
            pass
    if len(calls) > 500:
        for call in calls:
            call.close()
        calls = []
print(len(seen), got)
"""


def meet_often(count: int) -> list[str]:
    """Return the transports of process groups that are created during an attack."""
    found = []
    for _ in range(count):
        group = dist.new_group()
        assert gather(C10d(group, "cpu"))()
        found.append(type(way_of(group, TransportRequest(Transport.SHARED))).__name__)
        dist.destroy_process_group(group)
    return found


def test_another_user_of_the_machine_gets_nothing_and_stalls_nobody(pool: RankPool) -> None:
    if os.geteuid():
        pytest.skip("NOT TESTED: to be another user takes root")
    command = [sys.executable, "-c", ATTACK, "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attack:
        assert attack.stdout is not None
        assert attack.stdout.readline() == "ready\n"
        assert pool.run(3, meet_often, 20) == [[Shared.__name__] * 20] * 3
        seen, got = map(int, attack.communicate(timeout=60)[0].split())
    assert seen > 0
    assert got == 0
