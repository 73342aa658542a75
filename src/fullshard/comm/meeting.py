"""Discovery of which ranks of a process group share a host, and connections among them.

The ranks exchange names and keys once, through the process group. Every process on the machine can
read the names of sockets, so a name alone grants no access: both ends of a connection must run as
our user and show the key that the other end sent them through the process group.
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
"""Environment variable; if it is 0 on any rank, gloo carries everything."""

_TIMEOUT_S = 10.0
_RETRY_S = 0.002
_NBYTES = 16  # of each field of ``_Told``


class Meeting(NamedTuple):
    """The result of ``meet``."""

    hosts: tuple[bytes, ...]
    """The host of each rank, equal for ranks of one host; the same tuple on all ranks."""
    memory: Memory | None = None
    """This rank's memory, readable by all other ranks; None on all ranks unless all share."""
    neighbours: Mapping[int, Neighbour] = MappingProxyType({})
    """All other ranks if all share memory, by rank, beginning with the next higher rank."""


class _Told(NamedTuple):
    """The message that a rank sends another rank through the process group."""

    host: bytes
    circle: bytes
    """Equal for ranks that can share memory; zeros if the sender cannot or must not share."""
    name: bytes
    """Name of the sender's socket."""
    key: bytes
    """Key that the receiver must show to the sender; different for each receiver."""


def meet(group: dist.ProcessGroup) -> Meeting:
    """Meet the other ranks of ``group``; a collective.

    The ranks share memory if all run on one host as one user, and all can and may share memory.
    """
    rank, world = group.rank(), group.size()
    host, name = own_host(), secrets.token_bytes(_NBYTES)
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
    """Return memory to share, or None if this process cannot or must not share memory."""
    if os.environ.get(SWITCH) == "0" or not hasattr(os, "memfd_create"):
        return None
    try:
        memory = Memory()
        memory.grow(1)
    except (OSError, RuntimeError):
        return None
    return memory


def _told(group: dist.ProcessGroup, own: Sequence[bytes]) -> list[bytes]:
    """Send ``own[r]`` to rank r; return what each rank sent us. All messages are equally long."""
    said = torch.tensor(list(b"".join(own)), dtype=torch.uint8, device="cpu")
    heard = torch.empty_like(said)
    _torch.all_to_all(group, heard, said).wait()
    return [bytes(row.tolist()) for row in heard.view(group.size(), -1)]


def _split(said: bytes) -> _Told:
    return _Told(*(said[start : start + _NBYTES] for start in range(0, len(said), _NBYTES)))


def own_host() -> bytes:
    """Return a value that is equal for processes of one host, which see the same socket names.

    The value is a digest of the machine's boot ID and the network namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        return _digest(boot + os.readlink("/proc/self/ns/net").encode())
    except OSError:
        return _digest(socket.gethostname().encode())  # not Linux


def _digest(what: bytes) -> bytes:
    return hashlib.blake2b(what, digest_size=_NBYTES).digest()


def _address(name: bytes) -> bytes:
    """Return the address of an abstract socket: it is in no folder and ends with its process."""
    return b"\0fullshard-" + name.hex().encode()


def _listen(listening: socket.socket, name: bytes) -> bool:
    """Bind and listen; return whether that was possible."""
    try:
        listening.bind(_address(name))
        listening.listen(1024)
    except OSError:
        return False
    listening.setblocking(False)
    return True


@dataclass
class _Call:
    """A connection to a process of our user."""

    connection: socket.socket
    peer: int | None
    """Rank of the peer; None if the peer called us and has not said its rank yet."""
    received: bytes = b""
    fd: int = -1
    """File descriptor of the peer's memory; ours to close."""
    is_told: bool = False
    is_known: bool = False
    """True if the peer has shown our key."""

    def close(self) -> None:
        self.connection.close()
        if self.fd >= 0:
            os.close(self.fd)


class _Desk:
    """The connections of one rank: calls lower ranks, answers higher ranks, never blocks on one.

    Both ends send the same message: their rank, the key that the other end gave them, and a file
    descriptor of their memory. The caller sends first; the called rank answers once the key fits.
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
        self._is_deceived = False  # another user answered in the name of a rank

    def meet_all(self, listening: socket.socket) -> bool:
        """Call and answer until all ranks are met or time is up; return whether all were met."""
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
        """Hand over the connections to all ranks that were met, and their memories, by rank."""
        met, self._met = self._met, {}
        return {rank: (call.connection, LentMemory(call.fd)) for rank, call in met.items()}

    def close(self) -> None:
        """Close the calls that were not handed over."""
        for call in [*self._calls.values(), *self._met.values()]:
            call.close()

    def _call(self, peer: int) -> None:
        """Call rank ``peer``, or put it off: strangers may have filled the queue of its socket."""
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
        """Receive from every call that has data; wait ``_RETRY_S`` at most."""
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
        """Receive from ``call``; hang up on a peer that sends anything that no rank would send."""
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
        """Send our message to a peer that we called, or that has shown our key."""
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
                if error.errno != errno.ETOOMANYREFS:  # too many file descriptors in flight
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
    """Return whether the peer ran as our user when it connected or began to listen."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return bool(user == os.geteuid())
