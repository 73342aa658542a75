"""Connections among ranks that know each other's names and keys, strangers kept out.

Every process on the machine can read the names of sockets, and any host can call a port, so a name
alone grants no access. Both ends of a connection must show the key that the other end expects.
Within a host, both must run as our user.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fullshard.comm.addresses import dial
from fullshard.comm.memory import Memory

__all__ = ["NBYTES", "Desk", "NearDesk", "Told", "address", "listen"]

_TIMEOUT_S = 10.0
_RETRY_S = 0.002
NBYTES = 16
"""Bytes of each field of ``Told``."""


class Told(NamedTuple):
    """The message of a rank to all others, through the store."""

    place: bytes
    """Equal for ranks that can share memory; unlike all others if the sender cannot, or must not.

    Between circles, the address at which the sender listens; zeros if it has none.
    """
    name: bytes
    """Name of the sender's socket; between circles, the port."""
    secret: bytes
    """The keys that others must show to the sender are derived from it."""
    host: bytes = b""
    """Equal for ranks of one host."""
    wish: str = ""
    """The transport that the sender asks for."""

    @classmethod
    def unpacked(cls, said: bytes) -> Told:
        """Return the message that these bytes are."""
        parts = (said[start : start + NBYTES] for start in range(0, len(said), NBYTES))
        place, name, secret, host, wish = parts
        return cls(place, name, secret, host, wish.rstrip(b"\0").decode(errors="replace"))


def _key_for(secret: bytes, rank: int) -> bytes:
    """Return the key that ``rank`` must show to the rank whose secret this is."""
    return hashlib.blake2b(rank.to_bytes(4), key=secret, digest_size=NBYTES).digest()


def address(name: bytes) -> bytes:
    """Return the address of an abstract socket: it is in no folder and ends with its process."""
    return b"\0fullshard-" + name.hex().encode()


def listen(listening: socket.socket, name: bytes) -> bool:
    """Bind and listen; return whether that was possible."""
    try:
        listening.bind(address(name))
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


class Desk:
    """The connections of one rank: calls lower ranks, answers higher ranks, never blocks on one.

    Both ends send the same message: their rank and the key that the other end gave them. The caller
    sends first; the called rank answers once the key fits.
    """

    def __init__(self, rank: int, told: Sequence[Told], wanted: set[int]) -> None:
        """``wanted``: the ranks to meet, each of which wants to meet us."""
        self._rank = rank
        self._told = told
        self._wanted = wanted
        self._uncalled = {peer for peer in wanted if peer < rank}
        self._calls: dict[int, _Call] = {}  # by file descriptor
        self._met: dict[int, _Call] = {}  # by rank
        self._is_deceived = False  # another user answered in the name of a rank

    def meet_all(self, listening: socket.socket, check: Callable[[], object]) -> bool:
        """Call and answer until all ranks are met or time is up; return whether all were met.

        ``check`` is called at each turn of the loop, and may raise.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        with contextlib.suppress(OSError):
            while not (self._has_met_all() or self._is_deceived or time.monotonic() > deadline):
                check()
                for peer in list(self._uncalled):
                    self._call(peer)
                self._attend(listening)
                for call in list(self._calls.values()):
                    self._tell(call)
        return self._has_met_all()

    def _has_met_all(self) -> bool:
        return self._met.keys() == self._wanted

    def taken(self) -> dict[int, _Call]:
        """Hand over the connections to all ranks that were met, by rank."""
        met, self._met = self._met, {}
        return met

    def close(self) -> None:
        """Close the calls that were not handed over."""
        for call in [*self._calls.values(), *self._met.values()]:
            call.close()

    def _call(self, peer: int) -> None:
        """Call rank ``peer``, or put it off: strangers may have filled the queue of its socket."""
        with contextlib.suppress(BlockingIOError):
            connection = self._dialled(self._told[peer])
            self._uncalled.remove(peer)
            self._add(connection, peer)

    def _dialled(self, told: Told) -> socket.socket:
        """Return a connection to the one who told us this, perhaps still being made."""
        return dial(told.place, int.from_bytes(told.name))

    def _add(self, connection: socket.socket, peer: int | None) -> None:
        connection.setblocking(False)
        if self._is_trusted(connection):
            self._calls[connection.fileno()] = _Call(connection, peer)
        else:
            connection.close()
            if peer is not None:
                self._is_deceived = True

    def _is_trusted(self, connection: socket.socket) -> bool:
        """Return whether the other end may be asked for a key."""
        return True

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
        except OSError:
            part, fds = b"", []
        for fd in fds:
            os.set_inheritable(fd, False)  # ``recv_fds`` drops the flag that would do so
            if call.fd >= 0:
                os.close(call.fd)
            call.fd = fd
        call.received += part
        if part and len(call.received) < _SAID.size:
            return
        if part and self._recognizes(call):
            call.is_known = True
        else:
            self._hang_up(call)

    def _recognizes(self, call: _Call) -> bool:
        rank, key = _SAID.unpack(call.received)
        expected = self._wanted if call.peer is None else {call.peer}
        if rank not in expected or rank in self._met or (call.peer is None and rank < self._rank):
            return False
        call.peer = rank
        return hmac.compare_digest(key, _key_for(self._told[self._rank].secret, rank))

    def _tell(self, call: _Call) -> None:
        """Send our message to a peer that we called, or that has shown our key."""
        has_called = call.peer is not None and call.peer < self._rank
        if not call.is_told and (has_called or call.is_known):
            assert call.peer is not None
            key = _key_for(self._told[call.peer].secret, self._rank)
            said = _SAID.pack(self._rank, key)
            try:
                call.is_told = self._say(call, said) == len(said)
            except BlockingIOError:
                pass  # the connection is still being made
            except (ConnectionError, TimeoutError):
                self._hang_up(call)
        if call.is_told and call.is_known and call.peer is not None:
            del self._calls[call.connection.fileno()]
            self._met[call.peer] = call

    def _say(self, call: _Call, said: bytes) -> int:
        """Send ``said``; return how many bytes were sent."""
        return call.connection.send(said)

    def _hang_up(self, call: _Call) -> None:
        del self._calls[call.connection.fileno()]
        call.close()


class NearDesk(Desk):
    """The same among processes of our user on this host, which also send memory to each other."""

    def __init__(
        self,
        rank: int,
        told: Sequence[Told],
        wanted: set[int],
        memory: Memory | None,
    ) -> None:
        """``memory`` may be None if nobody is wanted."""
        super().__init__(rank, told, wanted)
        self._memory = memory

    def _dialled(self, told: Told) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            connection.connect(address(told.name))
        except OSError:
            connection.close()
            raise
        return connection

    def _is_trusted(self, connection: socket.socket) -> bool:
        return _is_of_our_user(connection)

    def _recognizes(self, call: _Call) -> bool:
        return call.fd >= 0 and super()._recognizes(call)

    def _say(self, call: _Call, said: bytes) -> int:
        assert self._memory is not None
        fd = self._memory.opened_for_reading()
        try:
            return socket.send_fds(call.connection, [said], [fd])
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # too many file descriptors in flight
                raise
            return 0
        finally:
            os.close(fd)


_SAID = struct.Struct(f"=i{NBYTES}s")
_CREDENTIALS = struct.Struct("=iII")  # process, user, group


def _is_of_our_user(connection: socket.socket) -> bool:
    """Return whether the peer ran as our user when it connected or began to listen."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return bool(user == os.geteuid())
