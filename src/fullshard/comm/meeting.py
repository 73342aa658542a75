"""How the ranks of a process group find out which of them share a host, and meet those.

What they must know of each other goes by the process group, once. Sockets have names that every
process of the machine can read, so a name lets nobody in: who calls, and who answers, must be of
our user and show a key that it has from the other one by the process group.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard import _torch
from fullshard.comm.memory import LentMemory, Memory
from fullshard.comm.neighbours import Neighbour

SWITCH = "FULLSHARD_SHARED_MEMORY"
"""Environment variable; 0 on any rank: gloo carries everything."""

_TIMEOUT_S = 10.0
_RETRY_S = 0.002
_NBYTES = 16  # of each thing that is told


class Meeting(NamedTuple):
    """What came of it."""

    hosts: tuple[bytes, ...]
    """Equal for ranks of one host, by rank; the same on all ranks."""
    memory: Memory | None = None
    """Of this rank; all others can read it. None, on all ranks, unless all share memory."""
    neighbours: Mapping[int, Neighbour] = MappingProxyType({})
    """All others, by rank, next higher first, if all share memory."""


class _Told(NamedTuple):
    """What a rank tells another one by the process group."""

    host: bytes
    circle: bytes
    """Equal for ranks that can share memory; zeros: this one cannot, or must not."""
    name: bytes
    """Of its socket."""
    key: bytes
    """That the other one must show; every rank gets one of its own."""


def meet(group: dist.ProcessGroup) -> Meeting:
    """Meet the other ranks of ``group``; all ranks call this.

    They share memory if all are on one host, and of one user, and can and may do it.
    """
    rank, world = group.rank(), group.size()
    host, name = _host(), secrets.token_bytes(_NBYTES)
    keys = [secrets.token_bytes(_NBYTES) for _ in range(world)]
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.socket(socket.AF_UNIX))
        memory = _memory()
        if memory is not None and _listen(listening, name):
            circle = _digest(host + str(os.geteuid()).encode())
        else:
            circle = bytes(_NBYTES)
        told = [_split(s) for s in _told(group, [host + circle + name + key for key in keys])]
        hosts = tuple(one.host for one in told)
        if memory is None or {one.circle for one in told} != {circle} or not any(circle):
            return Meeting(hosts)
        desk = _Desk(rank, told, keys, memory)
        opened.callback(desk.close)
        has_met = desk.meet_all(listening)
        if any(flag != b"\1" for flag in _told(group, [bytes([has_met])] * world)):
            return Meeting(hosts)
        peers = desk.taken()
    timeout_s = _torch.timeout_of(group, "cpu").total_seconds()
    order = [(rank + distance) % world for distance in range(1, world)]
    neighbours = {peer: Neighbour(peer, *peers[peer], timeout_s) for peer in order}
    return Meeting(hosts, memory, neighbours)


def _memory() -> Memory | None:
    """Memory to share; None if this process cannot, or must not."""
    if os.environ.get(SWITCH) == "0" or not hasattr(os, "memfd_create"):
        return None
    try:
        memory = Memory()
        memory.grow(1)
    except (OSError, RuntimeError):
        return None
    return memory


def _told(group: dist.ProcessGroup, own: Sequence[bytes]) -> list[bytes]:
    """What every rank says to this one, which says ``own[r]`` to rank r; all as many bytes."""
    said = torch.tensor(list(b"".join(own)), dtype=torch.uint8, device="cpu")
    heard = torch.empty_like(said)
    _torch.all_to_all(group, heard, said).wait()
    return [bytes(row.tolist()) for row in heard.view(group.size(), -1)]


def _split(said: bytes) -> _Told:
    return _Told(*(said[start : start + _NBYTES] for start in range(0, len(said), _NBYTES)))


def _host() -> bytes:
    """Equal for processes of one host, which know the same names of sockets.

    A digest of this boot of the machine and of the network namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        return _digest(boot + os.readlink("/proc/self/ns/net").encode())
    except OSError:
        return _digest(socket.gethostname().encode())  # not Linux


def _digest(what: bytes) -> bytes:
    return hashlib.blake2b(what, digest_size=_NBYTES).digest()


def _address(name: bytes) -> bytes:
    """Of a socket that is in no folder and ends with its process."""
    return b"\0fullshard-" + name.hex().encode()


def _listen(listening: socket.socket, name: bytes) -> bool:
    """Whether that is possible."""
    try:
        listening.bind(_address(name))
        listening.listen(1024)
    except OSError:
        return False
    listening.setblocking(False)
    return True


@dataclass
class _Call:
    """A connection to somebody of our user."""

    connection: socket.socket
    peer: int | None
    """The rank that was called; None: it called, and has not said which one it is."""
    received: bytes = b""
    fd: int = -1
    """Of the other one's memory; it is ours to close."""
    is_told: bool = False
    is_known: bool = False
    """Whether it has shown our key."""

    def close(self) -> None:
        """Close what there is."""
        self.connection.close()
        if self.fd >= 0:
            os.close(self.fd)


class _Desk:
    """Calls the ranks below, answers those above, and waits for nobody in particular.

    Both sides say the same: their rank, the key that they have from the other one, and, beside it,
    a file descriptor of their memory. Who calls begins; others are answered once they are known.
    """

    def __init__(
        self, rank: int, told: Sequence[_Told], keys: Sequence[bytes], memory: Memory
    ) -> None:
        self._rank = rank
        self._told = told
        self._keys = keys
        self._memory = memory
        self._uncalled = set(range(rank))
        self._calls: dict[int, _Call] = {}  # by file descriptor
        self._met: dict[int, _Call] = {}  # by rank
        self._is_deceived = False  # another user answers in the name of a rank

    def meet_all(self, listening: socket.socket) -> bool:
        """Whether all ranks were met in time."""
        deadline = time.monotonic() + _TIMEOUT_S
        with contextlib.suppress(OSError):
            while not (self._has_met_all() or self._is_deceived or time.monotonic() > deadline):
                for peer in list(self._uncalled):
                    self._call(peer)
                self._attend(listening)
                for call in list(self._calls.values()):
                    self._tell(call)
        return self._has_met_all()

    def _has_met_all(self) -> bool:
        return len(self._met) == len(self._told) - 1

    def taken(self) -> dict[int, tuple[socket.socket, LentMemory]]:
        """Connections to all ranks that were met, and their memories, by rank."""
        met, self._met = self._met, {}
        return {rank: (call.connection, LentMemory(call.fd)) for rank, call in met.items()}

    def close(self) -> None:
        """Close what was not taken."""
        for call in [*self._calls.values(), *self._met.values()]:
            call.close()

    def _call(self, peer: int) -> None:
        """Call rank ``peer``, or leave it for later: strangers may fill the queue of its socket."""
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            connection.connect(_address(self._told[peer].name))
        except BlockingIOError:
            connection.close()
            return
        except OSError:
            connection.close()
            raise
        self._uncalled.remove(peer)
        self._add(connection, peer)

    def _add(self, connection: socket.socket, peer: int | None) -> None:
        connection.setblocking(False)
        if _is_of_our_user(connection):
            self._calls[connection.fileno()] = _Call(connection, peer)
        else:
            connection.close()
            if peer is not None:
                self._is_deceived = True

    def _attend(self, listening: socket.socket) -> None:
        """Hear what there is, after a moment at the latest."""
        poll = select.poll()
        for fileno in (listening.fileno(), *self._calls):
            poll.register(fileno, select.POLLIN)
        for fileno, _ in poll.poll(1000 * _RETRY_S):
            if fileno in self._calls:
                self._hear(self._calls[fileno])
            else:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    self._add(listening.accept()[0], None)

    def _hear(self, call: _Call) -> None:
        """Take what somebody says; hang up on who says something else than a rank would."""
        missing = _SAID.size - len(call.received)
        try:
            part, fds, *_ = socket.recv_fds(call.connection, missing, 1)
        except ConnectionError:
            part, fds = b"", []
        for fd in fds:
            if call.fd >= 0:
                os.close(call.fd)
            call.fd = fd
        call.received += part
        if part and len(call.received) < _SAID.size:
            return
        if part and call.fd >= 0 and self._recognizes(call):
            call.is_known = True
        else:
            self._hang_up(call)

    def _recognizes(self, call: _Call) -> bool:
        rank, key = _SAID.unpack(call.received)
        expected = range(self._rank + 1, len(self._told)) if call.peer is None else [call.peer]
        if rank not in expected or rank in self._met:
            return False
        call.peer = rank
        return hmac.compare_digest(key, self._keys[rank])

    def _tell(self, call: _Call) -> None:
        """Say who we are to who was called, or is known."""
        has_called = call.peer is not None and call.peer < self._rank
        if not call.is_told and (has_called or call.is_known):
            assert call.peer is not None
            fd = self._memory.opened_for_reading()
            try:
                said = _SAID.pack(self._rank, self._told[call.peer].key)
                call.is_told = socket.send_fds(call.connection, [said], [fd]) == len(said)
            except ConnectionError:
                self._hang_up(call)
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:  # too many such are on their way
                    raise
            finally:
                os.close(fd)
        if call.is_told and call.is_known and call.peer is not None:
            del self._calls[call.connection.fileno()]
            self._met[call.peer] = call

    def _hang_up(self, call: _Call) -> None:
        del self._calls[call.connection.fileno()]
        call.close()


_SAID = struct.Struct(f"=i{_NBYTES}s")
_CREDENTIALS = struct.Struct("=iII")  # process, user, group


def _is_of_our_user(connection: socket.socket) -> bool:
    """Whether the process at the other end is; as it was when it called, or began to listen."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return bool(user == os.geteuid())
