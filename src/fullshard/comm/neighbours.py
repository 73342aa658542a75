"""Notices between processes of one host: over Unix sockets, they say where data is in memory.

Sending a notice never blocks: a thread sends the bytes that a socket does not accept at once.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from torch import Tensor

from fullshard.comm.fault_domain import Era
from fullshard.comm.memory import LentMemory
from fullshard.errors import LostRankError

_READ_NBYTES = 1 << 16
_FAREWELL_S = 30.0
"""Seconds that a leaving rank waits for a peer that reads none of its remaining notices."""


class Notice(NamedTuple):
    """A message to all neighbors about one exchange that the sender takes part in."""

    number: int
    """Number of the exchange; all ranks count exchanges alike."""
    start: int
    """Offset of the exchange's bytes in the sender's memory."""
    nbytes: int
    subject: int
    """Index of the exchange's subject among the subjects of the sender; negative for trouble."""
    done: tuple[int, ...]
    """Numbers of the exchanges that the sender has finished reading since its previous notice."""
    text: str
    """Text of the subject if the subject is new, else empty; for trouble, what is wrong."""
    source: int = -1
    """Rank that the bytes are from if the sender received them from another host, else -1."""

    def packed(self) -> bytes:
        """Return the notice as the bytes to send."""
        text = self.text.encode()
        head = _HEAD.pack(*self[:4], self.source, len(self.done), len(text))
        return head + struct.pack(f"={len(self.done)}q", *self.done) + text

    @classmethod
    def unpacked(cls, received: bytearray) -> Notice | None:
        """Remove the first notice from ``received`` and return it; None if it is incomplete."""
        if len(received) < _HEAD.size:
            return None
        number, start, nbytes, subject, source, num_done, text_nbytes = _HEAD.unpack_from(received)
        end_of_done = _HEAD.size + 8 * num_done
        end = end_of_done + text_nbytes
        if len(received) < end:
            return None
        done = struct.unpack_from(f"={num_done}q", received, _HEAD.size)
        text = received[end_of_done:end].decode()
        del received[:end]
        return cls(number, start, nbytes, subject, done, text, source)


_HEAD = struct.Struct("=7q")


class Line:
    """A connection to another rank on this host that carries notices, and that rank's memory."""

    def __init__(self, rank: int, connection: socket.socket, memory: LentMemory) -> None:
        connection.setblocking(False)
        self.rank = rank
        self._connection = connection
        self._outbox = _Outbox(connection)
        self.close = weakref.finalize(self, self._outbox.close)
        """Closes the connection once everything is sent."""
        self._memory = memory
        self._received = bytearray()
        self._subjects: list[str] = []
        _lines.add(self)

    def fileno(self) -> int:
        """Return the file descriptor to poll for notices from this neighbor."""
        return self._connection.fileno()

    def tell(self, packed: bytes) -> None:
        """Send a notice, now or later; if the neighbor is gone, only reading says so."""
        self._outbox.put(packed)

    def read(self, notice: Notice) -> Tensor:
        """Return the bytes that ``notice`` is about, without a copy."""
        return self._memory.read(notice.start, notice.nbytes)

    def subject_of(self, notice: Notice) -> str:
        """Return the text of the subject of ``notice``, which this neighbor sent."""
        return self._subjects[notice.subject]

    def notices(self) -> Iterator[Notice]:
        """Yield the notices that have arrived, without blocking.

        Raises:
            LostRankError: if the neighbor is gone and all that it sent before has been taken.
        """
        try:
            part = self._connection.recv(_READ_NBYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise LostRankError(str(error)) from error
        if not part:
            raise LostRankError("connection closed by peer")
        self._received += part
        while (notice := Notice.unpacked(self._received)) is not None:
            if notice.text and notice.subject >= 0:
                self._subjects.append(notice.text)
            yield notice


_lines: weakref.WeakSet[Line] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close the connections in a forked child: the others see its parent end only without them."""
    for line in list(_lines):
        line.close.detach()  # takes a lock, which a thread of the parent may have held
        line._connection.close()


os.register_at_fork(after_in_child=_leave_to_parent)


class Neighbour(Line):
    """Another rank on this host, with the notices that have arrived and are not used yet."""

    def __init__(
        self, rank: int, connection: socket.socket, memory: LentMemory, timeout_s: float
    ) -> None:
        super().__init__(rank, connection, memory)
        self.timeout_s = timeout_s
        self._arrived: dict[int, Notice] = {}
        self._last = -1  # number of the newest notice; notices arrive in order
        self._unwanted: set[int] = set()  # forgotten exchanges whose notice has not arrived
        self._done: list[int] = []

    def has_laid(self, number: int) -> bool:
        """Return whether the notice of exchange ``number`` has arrived."""
        return number in self._arrived

    def laid(self, number: int) -> tuple[Notice, Tensor]:
        """Remove and return the notice of exchange ``number``, and return the bytes it is about."""
        notice = self._arrived.pop(number)
        return notice, self.read(notice)

    def forget(self, number: int) -> None:
        """Drop the notice of exchange ``number``, now or when it arrives."""
        if number > self._last:
            self._unwanted.add(number)
        else:
            self._arrived.pop(number, None)

    def taken_done(self) -> list[int]:
        """Return the ``done`` exchanges of all notices that have arrived since the last call."""
        done, self._done = self._done, []
        return done

    def receive(self) -> None:
        """Take the notices that have arrived, without blocking.

        Raises:
            LostRankError: if the neighbor is gone and all that it sent before has been taken.
        """
        try:
            for notice in self.notices():
                self._take(notice)
        except LostRankError as lost:
            raise LostRankError(f"rank {self.rank} of the process group is gone: {lost}") from lost

    def _take(self, notice: Notice) -> None:
        self._done += notice.done
        self._last = notice.number
        if notice.number in self._unwanted:
            self._unwanted.remove(notice.number)
        else:
            self._arrived[notice.number] = notice


def wait_for(neighbours: Collection[Neighbour], era: Era, what: str) -> None:
    """Wait for the next notice from any of ``neighbours``; errors say that we wait for ``what``.

    Raises:
        LostRankError: if one is gone, or all are silent for the group's time-out.
        PeerError: the error of the fault that ended ``era``.
    """
    poll = select.poll()
    poll.register(era.fileno(), select.POLLIN)
    by_fileno = {neighbour.fileno(): neighbour for neighbour in neighbours}
    for fileno in by_fileno:
        poll.register(fileno, select.POLLIN)
    timeout_s = next(iter(neighbours)).timeout_s
    ready = poll.poll(1000 * timeout_s)
    era.check()
    for fileno, _ in ready:
        by_fileno[fileno].receive()
    if not ready:
        ranks = ", ".join(str(neighbour.rank) for neighbour in neighbours)
        raise LostRankError(
            f"rank {ranks} of the process group is there, but sent nothing for {timeout_s:.0f} s, "
            f"the group's time-out, while this rank waits for {what}; it hangs, or does something "
            "else"
        )


class _Outbox:
    """The unsent bytes of a connection, which stays open until they are sent.

    A reader may be thousands of notices behind or never read again, and we may need that reader
    elsewhere meanwhile. So only a thread waits here, which exists only while bytes are unsent.
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
                # Not a daemon thread: a process sends its remaining notices before it ends.
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
            return len(packed)  # whoever waits for this peer gets an error in ``receive``

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
