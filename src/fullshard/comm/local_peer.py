"""Records between processes of one host: over Unix sockets, they say where data is in memory.

Sending a record never blocks: a thread sends the bytes that a socket does not accept at once.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from torch import Tensor

from fullshard.comm.fault_domain import Era
from fullshard.comm.memory import LentMemory
from fullshard.comm.text import named_ranks
from fullshard.errors import LostRankError

_READ_NBYTES = 1 << 16
_FAREWELL_S = 30.0
"""Seconds that a leaving rank waits for a peer that reads none of its remaining records."""


FAILED = -1
"""The ``Record.signature`` of an exchange that failed at its sender."""


class Record(NamedTuple):
    """A message to all peers about one exchange that the sender takes part in."""

    number: int
    """Number of the exchange; all ranks count exchanges alike."""
    start: int
    """Offset of the exchange's bytes in the sender's memory."""
    nbytes: int
    signature: int
    """Index of the exchange's signature among the signatures of the sender."""
    acks: tuple[int, ...]
    """Numbers of the exchanges that the sender has finished reading since its previous record."""
    text: str
    """Text of the signature if that may be new, else empty; of a failure, the reason."""

    def packed(self) -> bytes:
        """Return the record as the bytes to send."""
        text = self.text.encode()
        head = _HEAD.pack(*self[:4], len(self.acks), len(text))
        return head + struct.pack(f"={len(self.acks)}q", *self.acks) + text

    @classmethod
    def unpacked(cls, received: bytearray) -> Record | None:
        """Remove the first record from ``received`` and return it; None if it is incomplete."""
        if len(received) < _HEAD.size:
            return None
        number, start, nbytes, signature, num_acks, text_nbytes = _HEAD.unpack_from(received)
        end_of_acks = _HEAD.size + 8 * num_acks
        end = end_of_acks + text_nbytes
        if len(received) < end:
            return None
        acks = struct.unpack_from(f"={num_acks}q", received, _HEAD.size)
        text = received[end_of_acks:end].decode()
        del received[:end]
        return cls(number, start, nbytes, signature, acks, text)


_HEAD = struct.Struct("=6q")


class LocalPeer:
    """Another rank on this host: a connection that carries records, and that rank's memory."""

    def __init__(
        self, rank: int, connection: socket.socket, memory: LentMemory, timeout_s: float
    ) -> None:
        connection.setblocking(False)
        self.rank = rank
        self.timeout_s = timeout_s
        self.is_gone = False
        """True once ``receive`` has found that the peer is gone."""
        self._connection = connection
        self._outbox = _Outbox(connection)
        self.close = weakref.finalize(self, self._outbox.close)
        """Closes the connection once everything is sent."""
        self._memory = memory
        self._received = bytearray()
        self._signatures: dict[int, str] = {}
        self._arrived: dict[int, Record] = {}
        self._unwanted: set[int] = set()  # forgotten exchanges whose record has not arrived
        self._acks: list[int] = []
        _peers.add(self)

    def fileno(self) -> int:
        """Return the file descriptor to poll for records from this peer."""
        return self._connection.fileno()

    def send(self, packed: bytes) -> None:
        """Send a record, now or later; if the peer is gone, only ``receive`` says so."""
        self._outbox.put(packed)

    def has_published(self, number: int) -> bool:
        """Return whether the record of exchange ``number`` has arrived."""
        return number in self._arrived

    def laid(self, number: int) -> tuple[Record, Tensor]:
        """Remove and return the record of exchange ``number``, and return the bytes it is about."""
        record = self._arrived.pop(number)
        return record, self._memory.read(record.start, record.nbytes)

    def signature_of(self, record: Record) -> str:
        """Return the text of the signature of ``record``, which this peer sent."""
        return self._signatures[record.signature]

    def discard(self, number: int) -> None:
        """Drop the untaken record of exchange ``number``, if need be once it arrives."""
        if self._arrived.pop(number, None) is None:
            self._unwanted.add(number)

    def taken_acks(self) -> list[int]:
        """Return the ``acks`` of all records that have arrived since the last call."""
        acks, self._acks = self._acks, []
        return acks

    def receive(self) -> None:
        """Take the records that have arrived, without blocking.

        Raises:
            LostRankError: if the peer is gone and all that it sent before has been taken.
        """
        try:
            part = self._connection.recv(_READ_NBYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost(error) from error
        if not part:
            raise self._lost("connection closed by peer")
        self._received += part
        while (record := Record.unpacked(self._received)) is not None:
            self._take(record)

    def _lost(self, why: object) -> LostRankError:
        self.is_gone = True
        return LostRankError(f"rank {self.rank} of the process group is gone: {why}")

    def _take(self, record: Record) -> None:
        self._acks += record.acks
        if record.text and record.signature != FAILED:
            self._signatures[record.signature] = record.text
        if record.number in self._unwanted:
            self._unwanted.remove(record.number)
        else:
            self._arrived[record.number] = record


_peers: weakref.WeakSet[LocalPeer] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close the connections in a forked child: an open copy would hide the end of the parent."""
    for peer in list(_peers):
        peer.close.detach()  # takes a lock, which a thread of the parent may have held
        peer._connection.close()


os.register_at_fork(after_in_child=_leave_to_parent)


class LocalPeers:
    """The other ranks of this host, of one process group and one era.

    All connections are in one epoll, so a wait costs the same however many ranks there are.
    """

    def __init__(self, peers: Iterable[LocalPeer], era: Era) -> None:
        """``era``: its end ends all waits."""
        self.by_rank = {peer.rank: peer for peer in peers}
        self.era = era
        self._by_fileno = {peer.fileno(): peer for peer in self.by_rank.values()}
        self._epoll = select.epoll()
        weakref.finalize(self, self._epoll.close)
        for fileno in (era.fileno(), *self._by_fileno):
            self.also_wait_for(fileno)

    def also_wait_for(self, fileno: int) -> None:
        """Let waits end once ``fileno`` can be read, too."""
        self._epoll.register(fileno, select.EPOLLIN)

    def send(self, packed: bytes) -> None:
        """Send a record to all; see ``LocalPeer.send``."""
        for peer in self.by_rank.values():
            peer.send(packed)

    def receive(self) -> None:
        """Take the records that have arrived; ignore lost peers: waiting for them raises."""
        for peer in self.by_rank.values():
            with suppress(LostRankError):
                peer.receive()

    def wait(self, missing: Collection[LocalPeer], what: str) -> None:
        """Wait until a peer sends or is lost, or a descriptor of ``also_wait_for`` is readable.

        It may return without a complete record, so callers check and call again. ``missing``: the
        peers whose records this rank needs; if empty, no time-out. ``what``: words for errors.

        Raises:
            LostRankError: if one of ``missing`` is gone, or all are silent for the time-out.
            PeerError: the error of the fault that ended the era.
        """
        for peer in missing:
            if peer.is_gone:
                peer.receive()
        timeout_s = next((peer.timeout_s for peer in missing), None)
        ready = self._epoll.poll(timeout_s)
        self.era.check()
        for fileno, _ in ready:
            if fileno in self._by_fileno:
                self._receive(fileno, missing)
        if not ready:
            ranks = named_ranks(sorted(peer.rank for peer in missing))
            raise LostRankError(
                f"{ranks} of the process group sent nothing for {timeout_s:.0f} s, the group's "
                f"time-out, while this rank waited for {what}: each listed rank hangs, or runs "
                "something else"
            )

    def _receive(self, fileno: int, missing: Collection[LocalPeer]) -> None:
        peer = self._by_fileno[fileno]
        try:
            peer.receive()
        except LostRankError:
            with suppress(OSError):  # another thread has done so
                self._epoll.unregister(fileno)  # else all later waits would end at once
            if peer in missing:
                raise


class _Outbox:
    """The unsent bytes of a connection, which stays open until they are sent.

    The sender must not block: the reader may be far behind, may never read again, or may wait for
    the sender in another collective. A thread sends the rest, and ends once nothing is unsent.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.RLock()  # reentrant: garbage collection may close while we send
        self._unsent = bytearray()  # empty unless there is a thread
        self._is_closed = False

    def put(self, packed: bytes) -> None:
        """Send ``packed`` after everything that was put before."""
        with self._lock:
            if self._unsent:
                self._unsent += packed
                return
            sent = self._send(packed)
            if sent < len(packed):
                self._unsent += packed[sent:]
                # Not a daemon thread: a process sends its remaining records before it ends.
                thread = threading.Thread(target=self._send_rest, name="fullshard-outbox")
                with self._giving_up():
                    thread.start()

    def close(self) -> None:
        """Close the connection once everything is sent."""
        with self._lock:
            self._is_closed = True
            if not self._unsent:
                self._connection.close()

    def _send(self, packed: bytes) -> int:
        """Send some of ``packed``; return how many bytes, or all of them if the reader is gone."""
        try:
            return self._connection.send(packed)
        except BlockingIOError:
            return 0
        except OSError:
            return len(packed)  # the next ``receive`` from this peer raises

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Shut the connection down if the block raises, so that both ends see it closed."""
        try:
            yield
        except BaseException:
            self._unsent.clear()
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            raise

    def _send_rest(self) -> None:
        with suppress(Exception), self._giving_up():
            self._send_all()

    def _send_all(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        while True:
            is_leaving = self._is_closed or not threading.main_thread().is_alive()
            is_ready = poll.poll(1000 * (_FAREWELL_S if is_leaving else 1))
            with self._lock:
                if is_leaving and not is_ready:
                    self._unsent.clear()  # the peer may be waiting for us in the same way
                del self._unsent[: self._send(bytes(self._unsent[:_READ_NBYTES]))]
                if not self._unsent:
                    if self._is_closed:
                        self._connection.close()
                    return
