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
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
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
    """A connection to a process of our user."""

    connection: socket.socket
    talk: Generator[int, bytes, None]
    """The handshake, which yields how many bytes it waits for; 0: until the next turn."""
    wanted: int
    """The last value that ``talk`` yielded."""
    received: bytes = b""
    """Bytes of a message that is incomplete."""
    fd: int = -1
    """File descriptor of the peer's memory, which ``close`` closes; -1: not yet received."""

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
                for call in [one for one in self._calls.values() if not one.wanted]:
                    self._go_on(call)
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
        """Begin a handshake; ``peer``: the rank that we called, None if the other end called."""
        connection.setblocking(False)
        if _is_of_our_user(connection):
            fileno = connection.fileno()
            self._calls[fileno] = call = _Call(connection, self._talk(fileno, peer), 0)
            self._go_on(call)
        else:
            connection.close()
            if peer is not None:
                self._has_bad_credentials = True

    def _attend(self, listening: socket.socket) -> None:
        """Accept new connections and receive from open ones; wait ``_RETRY_S`` at most."""
        poll = select.poll()
        waiting = [fileno for fileno, call in self._calls.items() if call.wanted]
        for fileno in (listening.fileno(), *waiting):
            poll.register(fileno, select.POLLIN)
        for fileno, _ in poll.poll(1000 * _RETRY_S):
            if fileno in self._calls:
                self._receive(self._calls[fileno])
            else:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    self._add(listening.accept()[0], None)

    def _receive(self, call: _Call) -> None:
        """Receive from ``call``; go on with it once a message is complete."""
        try:
            part, fds, *_ = socket.recv_fds(call.connection, call.wanted - len(call.received), 1)
        except OSError:
            part, fds = b"", []
        for fd in fds:
            os.set_inheritable(fd, False)  # ``recv_fds`` ignores MSG_CMSG_CLOEXEC
            if call.fd >= 0:
                os.close(call.fd)
            call.fd = fd
        call.received += part
        if not part or (call.fd >= 0) != (call.wanted == len(_MEMORY)):
            self._drop(call)
        elif len(call.received) == call.wanted:
            self._go_on(call)

    def _go_on(self, call: _Call) -> None:
        """Continue the handshake with the received bytes; drop it if it ends without success."""
        received, call.received = call.received, b""
        try:
            call.wanted = call.talk.send(received) if received else next(call.talk)
        except (StopIteration, OSError):
            if call.connection.fileno() in self._calls:
                self._drop(call)

    def _talk(self, fileno: int, peer: int | None) -> Generator[int, bytes, None]:
        """Run the handshake; return early if a message is not from an expected rank.

        Each end sends a hello, a proof and its memory: the caller sends its hello first. Each end
        sends its proof after the peer's hello has come, and its memory after the peer's proof. All
        messages are so short that a new connection takes them at once.
        """
        call, nonce = self._calls[fileno], secrets.token_bytes(NBYTES)
        hello = _HELLO.pack(self._rank, nonce)
        if peer is not None:
            call.connection.send(hello)
        rank, peer_nonce = _HELLO.unpack((yield _HELLO.size))
        expected = {peer} if peer is not None else {r for r in self._wanted if r > self._rank}
        if rank not in expected or rank in self._met:
            return
        if peer is None:
            call.connection.send(hello)
        call.connection.send(self._proof(self._rank, rank, peer_nonce))
        if not hmac.compare_digest((yield NBYTES), self._proof(rank, self._rank, nonce)):
            return
        while not self._sends_memory(call.connection):
            yield 0
        yield len(_MEMORY)
        if rank not in self._met:  # else a second connection of the same process
            del self._calls[fileno]
            self._met[rank] = call

    def _proof(self, sender: int, receiver: int, nonce: bytes) -> bytes:
        """Return what ``sender`` sends to prove to ``receiver`` that it knows both secrets."""
        both = self._infos[sender].secret + self._infos[receiver].secret
        return hashlib.blake2b(nonce, key=both, digest_size=NBYTES).digest()

    def _sends_memory(self, connection: socket.socket) -> bool:
        """Send a descriptor of our memory; return False if too many are in flight, for a retry."""
        assert self._memory is not None
        fd = self._memory.opened_for_reading()
        try:
            socket.send_fds(connection, [_MEMORY], [fd])
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            return False
        finally:
            os.close(fd)
        return True

    def _drop(self, call: _Call) -> None:
        del self._calls[call.connection.fileno()]
        call.close()


_HELLO = struct.Struct(f"=i{NBYTES}s")  # rank, nonce
_MEMORY = b"."  # comes with a descriptor of the sender's memory
_CREDENTIALS = struct.Struct("=iII")  # process, user, group


def _is_of_our_user(connection: socket.socket) -> bool:
    """Return whether the peer ran as our user when it connected or began to listen."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return bool(user == os.geteuid())
