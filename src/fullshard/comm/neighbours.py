"""Processes of one host that reach each other without the network: Unix sockets, shared memory.

Linux only. What is agreed on, and that all ranks can, goes by the process group once, when they
meet; afterwards a lost peer is seen by its socket, at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch
from fullshard.errors import LostRankError

__all__ = ["Memory", "Neighbour", "Notice", "neighbours_in"]

SWITCH = "FULLSHARD_SHARED_MEMORY"
"""Environment variable; 0 on any rank: gloo carries everything."""

_MEET_TIMEOUT_S = 10.0
_TOKEN_NBYTES = 16


class Memory:
    """Anonymous memory of this process that others can map once they have its file descriptor."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("fullshard")
        weakref.finalize(self, os.close, self.fd)
        self.bytes = torch.empty(0, dtype=torch.uint8)
        """All of it."""

    def reserve(self, nbytes: int) -> None:
        """Grow to at least ``nbytes``."""
        if nbytes > self.bytes.numel():
            self.bytes = _mapped(self.fd, nbytes)


def _mapped(fd: int, nbytes: int) -> Tensor:
    """The first ``nbytes`` of a file in memory, which has so many from then on, as uint8."""
    # By name, since Python's own mappings each keep a file descriptor.
    with torch.inference_mode(False):
        name = f"/proc/self/fd/{fd}"
        return torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)


class Notice(NamedTuple):
    """What a rank tells its neighbours of an exchange that it takes part in."""

    number: int
    """Of the exchange; all ranks count the same."""
    kind: int
    """What is done with the bytes."""
    nbytes: int
    slot: int
    """Which of the sender's memories holds its bytes."""
    done: tuple[int, ...]
    """Exchanges of which the sender has read, since the notice before, all it will ever read."""

    def packed(self) -> bytes:
        """As it travels."""
        head = _HEAD.pack(*self[:-1], len(self.done))
        return head + struct.pack(f"={len(self.done)}q", *self.done)


_HEAD = struct.Struct("=5q")


class Neighbour:
    """Another rank on this host."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self._rank = rank
        self._connection = connection
        weakref.finalize(self, connection.close)
        self._knows: dict[int, int] = {}  # how much of our slots it can read
        self._arrived: dict[int, Notice] = {}
        self._slots: dict[int, Tensor] = {}
        self._done: list[int] = []

    def tell(self, notice: Notice, memory: Memory) -> None:
        """Send ``notice``, and access to its ``memory`` if that is new, or larger than it was.

        Raises:
            LostRankError: it is gone.
        """
        nbytes = memory.bytes.numel()
        fds = [] if self._knows.get(notice.slot) == nbytes else [memory.fd]
        self._knows[notice.slot] = nbytes
        packed = notice.packed()
        try:
            sent = socket.send_fds(self._connection, [packed], fds)
            self._connection.sendall(packed[sent:])
        except OSError as error:
            raise self._lost(error) from error

    def laid_out(self, number: int) -> tuple[Notice, Tensor]:
        """The notice of exchange ``number``, and the bytes that all may read; waits for it.

        Raises:
            LostRankError: it is gone, or silent for longer than the group's time-out.
        """
        while number not in self._arrived:
            self._receive()
        notice = self._arrived.pop(number)
        return notice, self._slots[notice.slot][: notice.nbytes]

    def taken_done(self) -> list[int]:
        """Exchanges it is done with, of all notices that have come since the last call."""
        done, self._done = self._done, []
        return done

    def _receive(self) -> None:
        """The next notice."""
        head, fds = self._received(_HEAD.size)
        number, kind, nbytes, slot, num_done = _HEAD.unpack(head)
        for fd in fds:
            self._slots[slot] = _mapped(fd, os.fstat(fd).st_size)
            os.close(fd)
        packed, _ = self._received(8 * num_done)
        done = struct.unpack(f"={num_done}q", packed)
        self._done += done
        self._arrived[number] = Notice(number, kind, nbytes, slot, done)

    def _received(self, nbytes: int) -> tuple[bytes, list[int]]:
        """The next ``nbytes``, and file descriptors that came with them."""
        received, fds = b"", []
        while len(received) < nbytes:
            try:
                part, came, *_ = socket.recv_fds(self._connection, nbytes - len(received), 1)
            except OSError as error:
                raise self._lost(error) from error
            if not part:
                raise self._lost()
            received += part
            fds += came
        return received, fds

    def _lost(self, error: OSError | None = None) -> LostRankError:
        if isinstance(error, TimeoutError):
            why = f"sent nothing for {self._connection.gettimeout():.0f} s, the group's time-out"
        else:
            why = f"is gone: {error or 'connection closed by peer'}"
        return LostRankError(f"rank {self._rank} of the process group {why}")


def neighbours_in(group: dist.ProcessGroup) -> dict[int, Neighbour] | None:
    """The other ranks of ``group`` by number, next higher first; all ranks call this.

    None, on all of them, if not all are on one host or if any rank cannot or may not do it.
    """
    rank, world = group.rank(), group.size()
    token = secrets.token_bytes(_TOKEN_NBYTES)
    with socket.socket(socket.AF_UNIX) as listening:
        host = _host() if _listen(listening, token) else b""
        told = _told_all(group, (host or bytes(_TOKEN_NBYTES)) + token)
        hosts, tokens = zip(*((t[:_TOKEN_NBYTES], t[_TOKEN_NBYTES:]) for t in told), strict=True)
        if set(hosts) != {host}:
            return None
        connections = _connected(rank, tokens, listening)
    if any(flag != b"\1" for flag in _told_all(group, bytes([connections is not None]))):
        for connection in (connections or {}).values():
            connection.close()
        return None
    assert connections is not None
    timeout = _torch.timeout_of(group, "cpu").total_seconds()
    for connection in connections.values():
        connection.settimeout(timeout)
    order = [(rank + distance) % world for distance in range(1, world)]
    return {peer: Neighbour(peer, connections[peer]) for peer in order}


def _told_all(group: dist.ProcessGroup, own: bytes) -> list[bytes]:
    """What every rank says, each in as many bytes as this one."""
    said = torch.tensor(list(own), dtype=torch.uint8).repeat(group.size())
    heard = torch.empty_like(said)
    _torch.all_to_all(group, heard, said).wait()
    return [bytes(row.tolist()) for row in heard.view(group.size(), -1)]


def _host() -> bytes:
    """Equal for processes that know the same names of sockets; empty: this one cannot, or must not.

    A digest of this boot of the machine and of the network namespace.
    """
    if os.environ.get(SWITCH) == "0" or not hasattr(os, "memfd_create"):
        return b""
    try:
        os.close(os.memfd_create("fullshard"))
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespace = os.readlink("/proc/self/ns/net").encode()
    except OSError:
        return b""
    return hashlib.blake2b(boot + namespace, digest_size=_TOKEN_NBYTES).digest()


def _name(token: bytes) -> bytes:
    """Of a socket that is in no folder and ends with its process."""
    return b"\0fullshard-" + token.hex().encode()


def _listen(listening: socket.socket, token: bytes) -> bool:
    """Whether that is possible."""
    try:
        listening.bind(_name(token))
        listening.listen(1024)
    except OSError:
        return False
    listening.settimeout(_MEET_TIMEOUT_S)
    return True


def _connected(
    rank: int, tokens: Sequence[bytes], listening: socket.socket
) -> dict[int, socket.socket] | None:
    """Sockets to all other ranks, by rank; None if that fails.

    Every rank calls those below it and answers those above. All listen before anyone calls, and
    calls queue up, so nobody waits for a rank that waits for another. Who calls says its token.
    """
    connections = {}
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        for peer in range(rank):
            connections[peer] = calling = opened.enter_context(socket.socket(socket.AF_UNIX))
            calling.settimeout(_MEET_TIMEOUT_S)
            calling.connect(_name(tokens[peer]))
            calling.sendall(tokens[rank])
        while len(connections) < len(tokens) - 1:
            answered = opened.enter_context(listening.accept()[0])
            answered.settimeout(_MEET_TIMEOUT_S)
            said = answered.recv(_TOKEN_NBYTES, socket.MSG_WAITALL)
            if said in tokens:
                connections[tokens.index(said)] = answered
            else:
                answered.close()
        opened.pop_all()  # they stay open
        return connections
    return None
