"""Messages between ranks of different hosts: over TCP, each with the bytes that it announces.

Neither sending nor receiving blocks; the owner of a ``HostLink`` polls it. The bytes go from, and
arrive at, the memory that the owner names, without a copy.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from fullshard.errors import FullshardError, LostRankError, ProtocolError

__all__ = ["Arrival", "HostLink", "Trouble"]

_DIFFERS, _LOST = -1, -2
_MOST_VIEWS = 64  # in one call; the system allows 1024
_READ_NBYTES = 1 << 23  # in one turn, so that one link does not keep the others waiting


class Trouble(NamedTuple):
    """The reason why something that ranks wait for will not come."""

    rank: int
    """The rank that is to blame."""
    is_lost: bool
    """True if the rank is gone; False if it runs another collective."""
    text: str
    """Why the rank is gone, or what it runs."""

    def packed(self) -> tuple[int, str]:
        """Return the trouble as subject and text of a message."""
        return (_LOST if self.is_lost else _DIFFERS), f"{self.rank} {self.text}"

    @classmethod
    def unpacked(cls, subject: int, text: str) -> Trouble:
        """Return the trouble that a message with this negative subject tells."""
        rank, _, why = text.partition(" ")
        return cls(int(rank), subject == _LOST, why)

    def error(self, number: int, own: str) -> FullshardError:
        """Return the error for the rank that waits for collective ``number``, an ``own``."""
        if self.is_lost:
            return LostRankError(f"rank {self.rank} of the process group is gone: {self.text}")
        return ProtocolError(
            f"collective {number} of the process group is a {self.text}, on rank {self.rank} of "
            f"it and a {own}, on this rank: they run different units or different models, or in "
            "another order"
        )


class Arrival(NamedTuple):
    """The announcement of a message; its bytes follow."""

    number: int
    """Number of the exchange."""
    nbytes: int
    subject: str
    """What the sender runs; empty for trouble."""
    trouble: Trouble | None


class _Message(NamedTuple):
    views: list[memoryview]
    when_sent: Callable[[], None]
    tensors: Sequence[Tensor]
    """What ``views`` show, kept alive."""


_HEAD = struct.Struct("=4q")  # number, nbytes, index of the subject or trouble, bytes of text


class HostLink:
    """A connection to a rank of another host."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank = rank
        self._connection = connection
        self._unsent: deque[_Message] = deque()
        self._told: dict[str, int] = {}  # subjects that the other rank knows
        self._heard: list[str] = []  # subjects that the other rank has told us
        self._head = bytearray(_HEAD.size)
        self._views = [memoryview(self._head)]  # what is to be received next
        self._stages = self._read()
        self._arrival: Arrival | None = None  # set while its bytes are received
        self._places: Sequence[Tensor] = ()  # what they are received into
        next(self._stages)
        _links.add(self)

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self._connection.fileno()

    @property
    def is_sending(self) -> bool:
        """True while some posted bytes are unsent."""
        return bool(self._unsent)

    def post(
        self,
        number: int,
        subject: str | Trouble,
        tensors: Sequence[Tensor],
        when_sent: Callable[[], None],
    ) -> None:
        """Append a message with the bytes of ``tensors``, which must stay until they are sent."""
        if isinstance(subject, Trouble):
            which, text = subject.packed()
        else:
            text = "" if subject in self._told else subject
            which = self._told.setdefault(subject, len(self._told))
        packed, nbytes = text.encode(), sum(tensor.nbytes for tensor in tensors)
        head = memoryview(_HEAD.pack(number, nbytes, which, len(packed)) + packed)
        self._unsent.append(_Message([head, *_views_of(tensors)], when_sent, tensors))

    def send(self) -> bool:
        """Send what the connection takes at once; return whether it took anything.

        If the other rank is gone, only receiving says so, after what it sent before.
        """
        has_sent = False
        while self._unsent:
            message = self._unsent[0]
            try:
                sent = self._connection.sendmsg(message.views[:_MOST_VIEWS])
            except BlockingIOError:
                break
            except OSError:
                self.drop()
                return True
            has_sent = True
            _advance(message.views, sent)
            if not message.views:
                self._unsent.popleft()
                message.when_sent()
        return has_sent

    def drop(self) -> None:
        """Drop all unsent messages as if they were sent: nobody will receive them."""
        while self._unsent:
            self._unsent.popleft().when_sent()

    def receive(
        self, place: Callable[[Arrival], Sequence[Tensor]]
    ) -> Iterator[tuple[Arrival, Sequence[Tensor]]]:
        """Receive what has come; yield each message, and the ``place`` of it, when all is there.

        Raises:
            LostRankError: if the other rank is gone and all that it sent before has been taken.
        """
        received = 0
        while received < _READ_NBYTES:
            try:
                nbytes, *_ = self._connection.recvmsg_into(self._views[:_MOST_VIEWS])
            except BlockingIOError:
                return
            except OSError as error:
                raise LostRankError(str(error)) from error
            if not nbytes:
                raise LostRankError("connection closed by peer")
            received += nbytes
            _advance(self._views, nbytes)
            while not self._views:
                announced, self._arrival = self._arrival, None
                if announced is not None:
                    self._views = [memoryview(self._head)]
                    yield announced, self._places
                    continue
                arrival = next(self._stages)
                if arrival is not None:
                    self._arrival = arrival
                    self._places = place(arrival)
                    self._views = _views_of(self._places)

    def _read(self) -> Iterator[Arrival | None]:
        """Parse one announcement after the other, each time that what was asked for is there."""
        yield None
        while True:
            number, nbytes, which, text_nbytes = _HEAD.unpack(self._head)
            text = ""
            if text_nbytes:
                said = bytearray(text_nbytes)
                self._views = [memoryview(said)]
                yield None
                text = said.decode()
            if which < 0:
                yield Arrival(number, nbytes, "", Trouble.unpacked(which, text))
                continue
            if text:
                self._heard.append(text)
            yield Arrival(number, nbytes, self._heard[which], None)

    def close(self) -> None:
        """Close the connection; what was sent before still arrives."""
        self._connection.close()


_links: weakref.WeakSet[HostLink] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close the connections in a forked child: the others see its parent end only without them."""
    for link in list(_links):
        link.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def _views_of(tensors: Sequence[Tensor]) -> list[memoryview]:
    """Return the bytes of contiguous CPU tensors, without empty ones; the caller keeps them."""
    arrays = [(ctypes.c_char * t.nbytes).from_address(t.data_ptr()) for t in tensors if t.nbytes]
    return [memoryview(array).cast("B") for array in arrays]


def _advance(views: list[memoryview], nbytes: int) -> None:
    """Remove the first ``nbytes`` bytes from ``views``, and empty views at the front."""
    done = 0
    while done < len(views) and views[done].nbytes <= nbytes:
        nbytes -= views[done].nbytes
        done += 1
    del views[:done]
    if nbytes:
        views[0] = views[0][nbytes:]
