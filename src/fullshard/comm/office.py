"""Carrying exchanges on: what comes from neighbours and other hosts goes where it is awaited."""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from fullshard.comm.crossing import Crossing
from fullshard.comm.links import Arrival, HostLink, Trouble
from fullshard.comm.neighbours import Line, Notice
from fullshard.errors import LostRankError

__all__ = ["Bell", "Office"]


class Bell:
    """Wakes whoever polls it, from any thread."""

    def __init__(self) -> None:
        self._inside, self._outside = socket.socketpair()
        self._inside.setblocking(False)
        self._outside.setblocking(False)

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self._inside.fileno()

    def ring(self) -> None:
        """Wake the one that polls, now or when it polls next."""
        with contextlib.suppress(OSError):  # it has rung often enough, or is closed
            self._outside.send(b"\0")

    def silence(self) -> None:
        """Take note of all rings."""
        with contextlib.suppress(BlockingIOError):
            self._inside.recv(4096)

    def close(self) -> None:
        """Close both ends."""
        self._inside.close()
        self._outside.close()


class _Doors:
    """The connections to other ranks, and the bell: what a rank waits at."""

    def __init__(self, bell: Bell, doors: Iterable[Line | HostLink]) -> None:
        self._bell = bell.fileno()
        self._of = {door.fileno(): door for door in doors}
        self._poll = select.poll()
        for fileno in (self._bell, *self._of):
            self._poll.register(fileno, select.POLLIN)

    def wait(self, timeout_s: float) -> Iterator[tuple[Line | HostLink | None, int]]:
        """Yield each door at which something is to be done, and what; None: the bell rang."""
        for fileno, events in self._poll.poll(1000 * timeout_s):
            yield self._of.get(fileno), events

    def watch(self, link: HostLink) -> None:
        """Wait for what ``link`` brings, and until it can take more if it has more to send."""
        events = select.POLLIN | (select.POLLOUT if link.is_sending else 0)
        self._poll.modify(link.fileno(), events)

    def leave(self, door: Line | HostLink) -> None:
        """Wait at ``door`` no longer."""
        self._poll.unregister(door.fileno())

    def close(self) -> None:
        """Close all connections."""
        for door in self._of.values():
            door.close()


class Office:
    """All exchanges in flight of one rank. ``step`` carries them on, in one thread at a time."""

    def __init__(self, lines: Mapping[int, Line], links: Mapping[int, HostLink]) -> None:
        self._lines = lines
        self._links = links
        self.bell = Bell()
        self.starting: deque[Crossing] = deque()
        """Exchanges that were started, in order, for ``step`` to take."""
        self.over: deque[int] = deque()
        """Numbers of the exchanges that need nothing more from this rank."""
        self.read: deque[int] = deque()
        """Numbers of the exchanges that neighbours have read; one entry for each neighbour."""
        self._open: dict[int, Crossing] = {}
        self._urgent: set[int] = set()
        self._next = 0  # number of the next exchange to start
        # What came for exchanges that this rank has not started yet.
        self._early: dict[int, list[Callable[[Crossing], None]]] = {}
        self._gone: dict[int, Trouble] = {}
        self._doors = _Doors(self.bell, [*lines.values(), *links.values()])

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do for any exchange that was started."""
        return not (self.starting or self._open or self.is_sending)

    @property
    def is_urgent(self) -> bool:
        """True if there is something to do that cannot wait until this rank waits for it."""
        return bool(self.starting or self._urgent) or self.is_sending

    @property
    def is_sending(self) -> bool:
        """True if bytes wait to be sent."""
        return any(link.is_sending for link in self._links.values())

    def step(self, timeout_s: float) -> bool:
        """Do what can be done, waiting ``timeout_s`` for something to do; return whether it came.

        Raises nothing because of other ranks: whoever waits for an exchange finds the trouble.
        """
        has_moved = self._start()
        for link in self._links.values():
            if link.is_sending:
                has_moved |= self._send(link)
        for door, events in self._doors.wait(0 if has_moved else timeout_s):
            if door is None:
                self.bell.silence()
                continue
            has_moved = True
            if isinstance(door, Line):
                self._hear(door)
                continue
            if events & select.POLLOUT:
                self._send(door)
            if events & ~select.POLLOUT and door.rank not in self._gone:
                self._receive(door)
        return has_moved

    def send(self, crossing: Crossing, rank: int, what: Sequence[Tensor] | Trouble) -> None:
        """See ``Post.send``."""
        if rank in self._gone:
            return
        crossing.num_unsent += 1
        when_sent = partial(self._count_sent, crossing)
        if isinstance(what, Trouble):
            self._links[rank].post(crossing.number, what, (), when_sent)
        else:
            self._links[rank].post(crossing.number, crossing.subject, what, when_sent)

    def tell(self, crossing: Crossing, start: int, what: int | Trouble, source: int) -> None:
        """See ``Post.tell``."""
        subject, text, nbytes = 0, "", 0
        if isinstance(what, Trouble):
            subject, text = what.packed()
        else:
            nbytes = what
        packed = Notice(crossing.number, start, nbytes, subject, (), text, source).packed()
        for line in self._lines.values():
            line.tell(packed)

    def fail(self, why: str) -> None:
        """Tell the other ranks ``why`` this one carries no exchange on any more, and leave them.

        Ranks that are not told by the message, as sockets may be full, find connections closed.
        """
        with contextlib.suppress(Exception):
            for crossing in self._open.values():
                trouble = Trouble(crossing.routes.rank, True, why)
                for rank in self._links:
                    self.send(crossing, rank, trouble)
                self.tell(crossing, 0, trouble, crossing.routes.rank)
            for link in self._links.values():
                link.send()
        self.close()

    def close(self) -> None:
        """Close the connections; those to neighbours close when all was sent."""
        self._doors.close()
        self._early.clear()
        self.bell.close()

    def _start(self) -> bool:
        has_started = False
        while self.starting:
            crossing = self.starting.popleft()
            has_started = True
            self._open[crossing.number] = crossing
            self._next = crossing.number + 1
            if crossing.is_urgent:
                self._urgent.add(crossing.number)
            crossing.launch(self)
            for event in self._early.pop(crossing.number, ()):
                event(crossing)
            for trouble in self._gone.values():
                crossing.lose(self, trouble)
            self._end(crossing)
        return has_started

    def _end(self, crossing: Crossing) -> None:
        """Close ``crossing`` if nothing is left to do for it."""
        if crossing.is_over and self._open.pop(crossing.number, None) is not None:
            self._urgent.discard(crossing.number)
            self.over.append(crossing.number)

    def _give(self, number: int, event: Callable[[Crossing], None]) -> None:
        """Let ``event`` happen to exchange ``number``, now or when this rank starts it."""
        crossing = self._open.get(number)
        if crossing is not None:
            event(crossing)
            self._end(crossing)
        elif number >= self._next:
            self._early.setdefault(number, []).append(event)

    def _count_sent(self, crossing: Crossing) -> None:
        crossing.count_sent()
        self._end(crossing)

    def _send(self, link: HostLink) -> bool:
        has_moved = link.send()
        self._doors.watch(link)
        return has_moved

    def _hear(self, line: Line) -> None:
        try:
            for notice in line.notices():
                self.read.extend(notice.done)
                trouble = None
                if notice.subject < 0:
                    trouble = Trouble.unpacked(notice.subject, notice.text)
                subject = "" if trouble or notice.source >= 0 else line.subject_of(notice)
                self._give(notice.number, partial(self._notice, line, notice, subject, trouble))
        except LostRankError as lost:
            self._lose(line, lost)

    def _notice(
        self, line: Line, notice: Notice, subject: str, trouble: Trouble | None, crossing: Crossing
    ) -> None:
        what: Tensor | Trouble = trouble or line.read(notice)
        if notice.source in crossing.passed:
            crossing.take_passed(self, notice.source, what)
        elif notice.source in (-1, line.rank) and line.rank in crossing.near:
            if trouble is None and subject and subject != crossing.subject:
                what = Trouble(line.rank, False, subject)
            crossing.take_near(self, line.rank, what)

    def _receive(self, link: HostLink) -> None:
        def place(arrival: Arrival) -> Sequence[Tensor]:
            crossing = self._open.get(arrival.number)
            if crossing is not None and arrival.subject == crossing.subject:
                found = crossing.places.get(link.rank)
                if found is not None:
                    return found
            return [torch.empty(arrival.nbytes, dtype=torch.uint8, device="cpu")]

        try:
            for arrival, places in link.receive(place):
                event = partial(self._message, link.rank, arrival, places)
                self._give(arrival.number, event)
        except LostRankError as lost:
            self._lose(link, lost)

    def _message(
        self, rank: int, arrival: Arrival, places: Sequence[Tensor], crossing: Crossing
    ) -> None:
        wanted = crossing.places.get(rank)
        if wanted is None:
            return
        trouble = arrival.trouble
        if trouble is None and arrival.subject != crossing.subject:
            trouble = Trouble(rank, False, arrival.subject)
        if trouble is None and places is not wanted:  # it came before this rank had a place for it
            start = 0
            for part in wanted:
                part.copy_(places[0][start : start + part.nbytes])
                start += part.nbytes
        crossing.take_sent(self, rank, trouble)

    def _lose(self, door: Line | HostLink, lost: LostRankError) -> None:
        """Give up a rank that is gone."""
        self._doors.leave(door)
        trouble = self._gone[door.rank] = Trouble(door.rank, True, str(lost))
        if isinstance(door, HostLink):
            door.drop()
        for crossing in list(self._open.values()):
            crossing.lose(self, trouble)
            self._end(crossing)
