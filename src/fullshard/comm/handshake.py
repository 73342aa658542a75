"""Connections among the ranks of a host, which know each other's names and secrets.

Every process on the machine can read the names of sockets, so a name alone grants no access. Both
ends of a connection must run as one user, and prove that they know the secrets of both. Only then
does each send a descriptor of its own memory.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fullshard.comm.memory import Memory

__all__ = ["NBYTES", "VERSION", "Handshake", "PeerInfo", "address", "listen"]

_TIMEOUT_S = 10.0
_RETRY_S = 0.002
VERSION = 1
"""Version of all that ranks send each other to connect, and once connected within a host."""
NBYTES = 16
"""Bytes of each field of ``PeerInfo``."""


class PeerInfo(NamedTuple):
    """The message of a rank to all others, through the store.

    Its first byte is ``VERSION``.
    """

    place: bytes
    """Equal for ranks that can share memory; unlike all others if the sender cannot or must not."""
    name: bytes
    """Name of the sender's socket."""
    secret: bytes
    """Known to the ranks alone; two ranks prove to each other that they know both of theirs."""
    host: bytes
    """Equal for ranks of one host."""
    wish: str
    """The transport that the sender asks for."""

    def packed(self) -> bytes:
        """Return the message as bytes."""
        wish = self.wish.encode()[:NBYTES].ljust(NBYTES, b"\0")
        return bytes([VERSION]) + self.place + self.name + self.secret + self.host + wish

    @classmethod
    def unpacked(cls, packed: bytes) -> PeerInfo:
        """Return the message that these bytes are, of a rank with the same ``VERSION``."""
        parts = (packed[start : start + NBYTES] for start in range(1, len(packed), NBYTES))
        place, name, secret, host, wish = parts
        return cls(place, name, secret, host, wish.rstrip(b"\0").decode(errors="replace"))


def address(name: bytes) -> bytes:
    """Return the abstract socket address of ``name``: no file, and gone when the socket closes."""
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
    """A connection to a process of our user.

    Each end sends a hello, a proof and its memory: the caller sends its hello first. Each end
    sends its proof after the peer's hello has come, and its memory after the peer's proof.
    """

    connection: socket.socket
    peer: int | None
    """Rank of the peer; None if the peer called us and has not sent its rank yet."""
    has_called: bool
    """True if this rank called."""
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NBYTES))
    """Random bytes from which the peer computes its proof."""
    peer_nonce: bytes = b""
    received: bytes = b""
    """Bytes of a message that is incomplete."""
    fd: int = -1
    """File descriptor of the peer's memory, which ``close`` closes; -1: not yet received."""
    num_sent: int = 0
    """Number of messages."""
    num_received: int = 0

    def may_send(self) -> bool:
        """Return whether the next message is due."""
        at_least = max(self.num_sent, 0 if self.has_called else 1)
        return self.num_sent < len(_SIZES) and self.num_received >= at_least

    def close(self) -> None:
        self.connection.close()
        if self.fd >= 0:
            os.close(self.fd)


class Handshake:
    """The connections of one rank: it connects to lower ranks and accepts higher ones."""

    def __init__(
        self, rank: int, infos: Sequence[PeerInfo], wanted: set[int], memory: Memory | None
    ) -> None:
        """``wanted``: the ranks to meet; if there are none, ``memory`` may be None."""
        self._rank = rank
        self._memory = memory
        self._infos = infos
        self._wanted = wanted
        self._uncalled = {peer for peer in wanted if peer < rank}
        self._calls: dict[int, _Call] = {}  # by file descriptor
        self._met: dict[int, _Call] = {}  # by rank
        self._has_bad_credentials = False  # another user answered in the name of a rank

    def meet_all(self, listening: socket.socket, check: Callable[[], object]) -> bool:
        """Connect to all wanted ranks; return False on time-out, another user or a socket error.

        ``check`` is called at each turn of the loop, and may raise.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        with contextlib.suppress(OSError):
            while not (
                self._has_met_all() or self._has_bad_credentials or time.monotonic() > deadline
            ):
                check()
                for peer in list(self._uncalled):
                    self._call(peer)
                self._attend(listening)
                for call in list(self._calls.values()):
                    self._send_due(call)
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
        """Connect to rank ``peer``; leave it for later if the backlog of its socket is full."""
        with contextlib.suppress(BlockingIOError):
            connection = self._connected(self._infos[peer])
            self._uncalled.remove(peer)
            self._add(connection, peer)

    def _connected(self, info: PeerInfo) -> socket.socket:
        """Return a connection to the sender of ``info``."""
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            connection.connect(address(info.name))
        except OSError:
            connection.close()
            raise
        return connection

    def _add(self, connection: socket.socket, peer: int | None) -> None:
        connection.setblocking(False)
        if _is_of_our_user(connection):
            self._calls[connection.fileno()] = _Call(connection, peer, has_called=peer is not None)
        else:
            connection.close()
            if peer is not None:
                self._has_bad_credentials = True

    def _attend(self, listening: socket.socket) -> None:
        """Accept new connections and receive from open ones; wait ``_RETRY_S`` at most."""
        poll = select.poll()
        for fileno in (listening.fileno(), *self._calls):
            poll.register(fileno, select.POLLIN)
        for fileno, _ in poll.poll(1000 * _RETRY_S):
            if fileno in self._calls:
                self._receive(self._calls[fileno])
            else:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    self._add(listening.accept()[0], None)

    def _receive(self, call: _Call) -> None:
        """Receive from ``call``; close it if the message is not that of an expected rank."""
        if call.num_received == len(_SIZES):  # the peer has sent all, so it has hung up
            self._drop(call)
            return
        missing = _SIZES[call.num_received] - len(call.received)
        try:
            part, fds, *_ = socket.recv_fds(call.connection, missing, 1)
        except OSError:
            part, fds = b"", []
        for fd in fds:
            os.set_inheritable(fd, False)  # ``recv_fds`` ignores MSG_CMSG_CLOEXEC
            if call.fd >= 0:
                os.close(call.fd)
            call.fd = fd
        call.received += part
        if part and len(call.received) < _SIZES[call.num_received]:
            return
        if part and self._accepts(call):
            call.received = b""
            call.num_received += 1
        else:
            self._drop(call)

    def _accepts(self, call: _Call) -> bool:
        """Return whether the message that was received is as it has to be."""
        if (call.fd >= 0) != (call.num_received == 2):
            return False
        if call.num_received == 0:
            rank, call.peer_nonce = _HELLO.unpack(call.received)
            ranks = self._wanted if call.peer is None else {call.peer}
            if rank not in ranks or rank in self._met or (rank < self._rank) != call.has_called:
                return False
            call.peer = rank
        if call.num_received == 1:
            assert call.peer is not None
            proof = self._proof(call.peer, self._rank, call.nonce)
            return hmac.compare_digest(call.received, proof)
        return True

    def _proof(self, sender: int, receiver: int, nonce: bytes) -> bytes:
        """Return what ``sender`` sends to prove to ``receiver`` that it knows both secrets."""
        both = self._infos[sender].secret + self._infos[receiver].secret
        return hashlib.blake2b(nonce, key=both, digest_size=NBYTES).digest()

    def _send_due(self, call: _Call) -> None:
        """Send what is due; hand the call over once all was sent and received."""
        try:
            while call.may_send():
                self._send(call)
                call.num_sent += 1
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # too many file descriptors in flight: later
                self._drop(call)
            return
        if call.num_sent == call.num_received == len(_SIZES):
            assert call.peer is not None
            del self._calls[call.connection.fileno()]
            self._met[call.peer] = call

    def _send(self, call: _Call) -> None:
        """Send the next message; all are so short that a new connection takes them at once."""
        if call.num_sent == 0:
            call.connection.send(_HELLO.pack(self._rank, call.nonce))
        elif call.num_sent == 1:
            assert call.peer is not None
            call.connection.send(self._proof(self._rank, call.peer, call.peer_nonce))
        else:
            assert self._memory is not None
            fd = self._memory.opened_for_reading()
            try:
                socket.send_fds(call.connection, [b"."], [fd])
            finally:
                os.close(fd)

    def _drop(self, call: _Call) -> None:
        del self._calls[call.connection.fileno()]
        call.close()


_HELLO = struct.Struct(f"=i{NBYTES}s")  # rank, nonce
_SIZES = (_HELLO.size, NBYTES, 1)
_CREDENTIALS = struct.Struct("=iII")  # process, user, group


def _is_of_our_user(connection: socket.socket) -> bool:
    """Return whether the peer ran as our user when it connected or began to listen."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return bool(user == os.geteuid())
