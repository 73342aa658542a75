"""Processes of one host that tell each other, over Unix sockets, what lies where in their memory.

Nobody waits in order to tell something: what a socket does not take at once a thread sends on.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import weakref
from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor

from fullshard.comm.memory import LentMemory
from fullshard.errors import LostRankError

_READ_NBYTES = 1 << 16
_FAREWELL_S = 30.0
"""How long a rank that leaves waits for who reads nothing of what it has still to tell."""


class Notice(NamedTuple):
    """What a rank tells its neighbours of an exchange that it takes part in."""

    number: int
    """Of the exchange; all ranks count the same."""
    start: int
    """Where in the sender's memory its bytes begin."""
    nbytes: int
    subject: int
    """Which of the sender's subjects the exchange is about."""
    done: tuple[int, ...]
    """Exchanges of which the sender has read, since the notice before, all it will ever read."""
    text: str
    """Of the subject, if it is a new one; else empty."""

    def packed(self) -> bytes:
        """As it travels."""
        text = self.text.encode()
        head = _HEAD.pack(*self[:4], len(self.done), len(text))
        return head + struct.pack(f"={len(self.done)}q", *self.done) + text

    @classmethod
    def unpacked(cls, received: bytearray) -> Notice | None:
        """The first of those in ``received``, from which it is taken; None: not all is there."""
        if len(received) < _HEAD.size:
            return None
        number, start, nbytes, subject, num_done, text_nbytes = _HEAD.unpack_from(received)
        end_of_done = _HEAD.size + 8 * num_done
        end = end_of_done + text_nbytes
        if len(received) < end:
            return None
        done = struct.unpack_from(f"={num_done}q", received, _HEAD.size)
        text = received[end_of_done:end].decode()
        del received[:end]
        return cls(number, start, nbytes, subject, done, text)


_HEAD = struct.Struct("=6q")


class Neighbour:
    """Another rank on this host."""

    def __init__(
        self, rank: int, connection: socket.socket, memory: LentMemory, timeout_s: float
    ) -> None:
        connection.setblocking(False)
        self.rank = rank
        self.timeout_s = timeout_s
        self._connection = connection
        self._outbox = _Outbox(connection)
        weakref.finalize(self, self._outbox.close)
        self._memory = memory
        self._received = bytearray()
        self._arrived: dict[int, Notice] = {}
        self._last = -1  # number of the newest notice; they come in order
        self._unwanted: set[int] = set()  # of those that have not come
        self._subjects: list[str] = []
        self._done: list[int] = []

    def fileno(self) -> int:
        """What a poll for news of it looks at."""
        return self._connection.fileno()

    def tell(self, packed: bytes) -> None:
        """Send a notice, at once or later; that it is gone is told to who waits for it."""
        self._outbox.put(packed)

    def has_laid(self, number: int) -> bool:
        """Whether the notice of exchange ``number`` has come."""
        return number in self._arrived

    def laid(self, number: int) -> tuple[Notice, Tensor]:
        """The notice of exchange ``number``, which has come, and what lies there."""
        notice = self._arrived.pop(number)
        return notice, self._memory.read(notice.start, notice.nbytes)

    def subject_of(self, notice: Notice) -> str:
        """What an exchange is about there."""
        return self._subjects[notice.subject]

    def forget(self, number: int) -> None:
        """Nobody asks for exchange ``number`` any more, if anybody ever did."""
        if number > self._last:
            self._unwanted.add(number)
        else:
            self._arrived.pop(number, None)

    def taken_done(self) -> list[int]:
        """Exchanges it is done with, of all notices that have come since the last call."""
        done, self._done = self._done, []
        return done

    def receive(self) -> None:
        """Take what has come; waits for nothing.

        Raises:
            LostRankError: it is gone, and all it said before has been taken.
        """
        try:
            part = self._connection.recv(_READ_NBYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost(str(error)) from error
        if not part:
            raise self._lost("connection closed by peer")
        self._received += part
        while (notice := Notice.unpacked(self._received)) is not None:
            self._take(notice)

    def _take(self, notice: Notice) -> None:
        self._done += notice.done
        self._last = notice.number
        if notice.text:
            self._subjects.append(notice.text)
        if notice.number in self._unwanted:
            self._unwanted.remove(notice.number)
        else:
            self._arrived[notice.number] = notice

    def _lost(self, why: str) -> LostRankError:
        return LostRankError(f"rank {self.rank} of the process group is gone: {why}")


def wait_for(neighbours: Collection[Neighbour], what: str) -> None:
    """Take what comes next from any of ``neighbours``; ``what`` is what they owe us, for errors.

    Raises:
        LostRankError: one is gone, or nobody has said anything for the group's time-out.
    """
    poll = select.poll()
    by_fileno = {neighbour.fileno(): neighbour for neighbour in neighbours}
    for fileno in by_fileno:
        poll.register(fileno, select.POLLIN)
    timeout_s = next(iter(neighbours)).timeout_s
    ready = poll.poll(1000 * timeout_s)
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
    """What a connection has still to send; it is kept open until that is sent.

    A reader may be thousands of notices behind, or may never read again what we tell it, and we may
    need that reader elsewhere meanwhile. So nobody waits here but a thread, which is there only
    while there is something to send.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.RLock()  # garbage collection may close it in the thread that sends
        self._unsent = bytearray()  # while there is a thread
        self._is_closed = False

    def put(self, packed: bytes) -> None:
        """Send ``packed`` after what was put before."""
        with self._lock:
            if self._unsent:
                self._unsent += packed
                return
            sent = self._send(packed)
            if sent < len(packed):
                self._unsent += packed[sent:]
                # No daemon: what a process owes others it tells before it ends.
                threading.Thread(target=self._send_rest, name="fullshard-outbox").start()

    def close(self) -> None:
        """Close the connection, once all is sent."""
        with self._lock:
            self._is_closed = True
            if not self._unsent:
                self._connection.close()

    def _send(self, packed: bytes) -> int:
        """How much of ``packed`` is sent, or need not be since nobody is there to read it."""
        try:
            return self._connection.send(packed)
        except BlockingIOError:
            return 0
        except OSError:
            return len(packed)  # who waits for an answer is told

    def _send_rest(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        while True:
            is_leaving = self._is_closed or not threading.main_thread().is_alive()
            is_ready = poll.poll(1000 * (_FAREWELL_S if is_leaving else 1))
            with self._lock:
                if is_leaving and not is_ready:
                    self._unsent.clear()  # perhaps it waits like this for us
                del self._unsent[: self._send(bytes(self._unsent[:_READ_NBYTES]))]
                if not self._unsent:
                    if self._is_closed:
                        self._connection.close()
                    return
