"""Exchanges among ranks of several hosts: what is still to come, and what to do when it comes.

Whoever has time carries an exchange on (see ``Office``); the thread that started it waits for what
it ``found``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fullshard.comm.links import Trouble
from fullshard.comm.means import put_sum, wide_dtype
from fullshard.comm.routes import Routes

__all__ = ["Area", "Crossing", "Gather", "Post", "Reduction"]


_SMALL_NBYTES = 1 << 18


class Post(Protocol):
    """What an exchange needs for sending."""

    def send(self, crossing: Crossing, rank: int, what: Sequence[Tensor] | Trouble) -> None:
        """Send bytes or bad news to a rank of another host."""

    def tell(self, crossing: Crossing, start: int, what: int | Trouble, source: int) -> None:
        """Tell neighbours where, and how many, bytes of ``source`` are in memory, or bad news."""


class Crossing:
    """An exchange in flight. All but ``found`` belongs to the thread that carries it on."""

    def __init__(self, number: int, subject: str, routes: Routes) -> None:
        self.number = number
        self.subject = subject
        """What the ranks run, with the size; compared among them."""
        self.routes = routes
        self.near = {rank for rank in routes.own if rank != routes.rank}
        """Neighbours whose data is still to come."""
        self.places: dict[int, list[Tensor]] = {}
        """Where to put the messages that are still to come from other hosts, by rank, as bytes."""
        self.passed: set[int] = set()
        """Ranks of other hosts whose data is still to come from a neighbour."""
        self.num_unsent = 0
        self.is_ready = True
        """False until this rank has what it is to send."""
        self.found: SimpleQueue[tuple[int, Tensor | None] | Trouble | None] = SimpleQueue()
        """The data of a rank (None: it is in place); or None once all is sent, if ``is_alone``."""

    @property
    def is_alone(self) -> bool:
        """True if this rank has no neighbours: then what it sends is memory of its callers."""
        return len(self.routes.own) == 1

    @property
    def num_finds(self) -> int:
        """How often ``found`` says something if all goes well."""
        return self.routes.world - 1 + self.is_alone

    @property
    def is_urgent(self) -> bool:
        """True if more has to be done than to wait for a few bytes that a socket keeps for us."""
        places = [part for parts in self.places.values() for part in parts]
        return not (self.is_alone and sum(part.nbytes for part in places) <= _SMALL_NBYTES)

    @property
    def is_over(self) -> bool:
        """True if nothing is to come and nothing to be sent."""
        is_waiting = self.near or self.places or self.passed or self.num_unsent
        return self.is_ready and not is_waiting

    def launch(self, post: Post) -> None:
        """Send what can be sent before anything has come."""

    def take_near(self, post: Post, rank: int, what: Tensor | Trouble) -> None:
        """Take the data of a neighbour."""
        self.near.remove(rank)
        self.found.put(what if isinstance(what, Trouble) else (rank, what))

    def take_sent(self, post: Post, rank: int, trouble: Trouble | None) -> None:
        """Take what a rank of another host sent, which is in its place."""
        place = self.places.pop(rank)
        self.found.put(trouble or (rank, place[0]))

    def take_passed(self, post: Post, source: int, what: Tensor | Trouble) -> None:
        """Take what a neighbour received from a rank of another host."""
        self.passed.remove(source)
        self.found.put(what if isinstance(what, Trouble) else (source, what))

    def lose(self, post: Post, trouble: Trouble) -> None:
        """Give up everything that was to come from a rank that is gone."""
        rank = trouble.rank
        if rank in self.near:
            self.take_near(post, rank, trouble)
        if rank in self.places:
            self.take_sent(post, rank, trouble)
        for source in [s for s in self.passed if self.routes.agent_of[s] == rank]:
            self.take_passed(post, source, trouble)

    def count_sent(self) -> None:
        """Take note that one message has left."""
        self.num_unsent -= 1
        if not self.num_unsent and self.is_alone:
            self.found.put(None)


class Area(NamedTuple):
    """Where a gather keeps the bytes of one rank."""

    start: int
    """Offset in the memory of this rank."""
    memory: Tensor | None
    """What neighbours read; None without neighbours."""
    places: list[Tensor]
    """The parts of it, or other memory, that the pieces of the rank go to."""


class Gather(Crossing):
    """Every rank's bytes go to one rank of each other host, which shows them to its neighbours."""

    def __init__(
        self,
        number: int,
        subject: str,
        routes: Routes,
        areas: Mapping[int, Area],
        *,
        is_ready: bool,
    ) -> None:
        """``areas`` by rank: ours, and those of the ranks that send to us; see ``is_ready``."""
        super().__init__(number, subject, routes)
        self._areas = areas
        self.places = {rank: areas[rank].places for rank in routes.outsiders}
        self.passed = {rank for rank, agent in routes.agent_of.items() if agent != routes.rank}
        self.is_ready = is_ready
        self._awaits_own = not is_ready

    @property
    def num_finds(self) -> int:
        """See ``Crossing``; our own bytes are found, too, if they were not there at first."""
        return super().num_finds + self._awaits_own

    def launch(self, post: Post) -> None:
        """Send our bytes unless ``take_own`` does, which may have happened before."""
        if not self._awaits_own:
            for rank in self.routes.own_agents:
                post.send(self, rank, self._areas[self.routes.rank].places)

    def take_own(self, post: Post, trouble: Trouble | None) -> None:
        """Send and show our bytes, which are there only now, or say why they will not come."""
        self.is_ready = True
        for rank in self.routes.own_agents:
            post.send(self, rank, trouble or self._areas[self.routes.rank].places)
        self._show(post, self.routes.rank, trouble)

    def take_sent(self, post: Post, rank: int, trouble: Trouble | None) -> None:
        """Pass on to the neighbours what came."""
        self.places.pop(rank)
        self._show(post, rank, trouble)

    def _show(self, post: Post, rank: int, trouble: Trouble | None) -> None:
        start, memory, _ = self._areas[rank]
        if memory is not None:
            post.tell(self, start, trouble or memory.nbytes, rank)
        self.found.put(trouble or (rank, memory))


class Reduction(Crossing):
    """One rank of each host adds up its neighbours' rows for a rank of another host, and sends it.

    ``rows[r]`` is for rank r, as the neighbours see it in our memory; ranks that are alone on their
    host send rows as they are.
    """

    def __init__(
        self,
        number: int,
        subject: str,
        routes: Routes,
        rows: Sequence[Tensor],
        starts: Sequence[int],
    ) -> None:
        """``starts[r]``: where in its memory every neighbour keeps its row for rank r."""
        super().__init__(number, subject, routes)
        self.rows = rows
        self._starts = starts
        self._laid: dict[int, Tensor] = {}
        own = rows[routes.rank]
        self._sums: dict[int, Tensor] = {}
        for circle, agent in zip(routes.others, routes.own_agents, strict=True):
            dtype = own.dtype if len(circle) == 1 else wide_dtype(own.dtype)
            self._sums[agent] = torch.empty(own.numel(), dtype=dtype, device="cpu")
            self.places[agent] = [self._sums[agent].view(torch.uint8)]
        self._trouble: Trouble | None = None
        self.then: Callable[[Post, Trouble | None], None] | None = None
        """What to do, instead of telling the thread that started it, when all has come."""

    @property
    def num_finds(self) -> int:
        """See ``Crossing``; that all rows are here is one thing."""
        return 1 + self.is_alone

    @property
    def is_urgent(self) -> bool:
        """See ``Crossing``; what comes next is for the others, too."""
        return self.then is not None or super().is_urgent

    def parts(self) -> list[Tensor]:
        """Return the rows and sums of the other ranks for this rank, in the order of ranks."""
        found = {rank: self._row(rank, self.routes.rank) for rank in self._laid} | self._sums
        return [found[rank] for rank in sorted(found)]

    def launch(self, post: Post) -> None:
        """Send the rows of a rank that has no neighbours."""
        if not self.near:
            self._add_up(post)

    def take_near(self, post: Post, rank: int, what: Tensor | Trouble) -> None:
        """Keep the rows of a neighbour; add up when all are here."""
        self.near.remove(rank)
        if isinstance(what, Trouble):
            self._trouble = self._trouble or what
        else:
            self._laid[rank] = what
        if not self.near:
            self._add_up(post)
            self._settle(post)

    def take_sent(self, post: Post, rank: int, trouble: Trouble | None) -> None:
        """Take the sum of another host."""
        del self.places[rank]
        self._trouble = self._trouble or trouble
        self._settle(post)

    def _add_up(self, post: Post) -> None:
        """Send each rank whose agent we are the sum of our circle's rows, or bad news."""
        for rank in self.routes.outsiders:
            if self._trouble is not None:
                post.send(self, rank, self._trouble)
            elif not self._laid:
                post.send(self, rank, [self.rows[rank].view(torch.uint8)])
            else:
                own = self.rows[rank]
                total = torch.empty(own.numel(), dtype=wide_dtype(own.dtype), device="cpu")
                put_sum(total, own, [self._row(peer, rank) for peer in sorted(self._laid)])
                post.send(self, rank, [total.view(torch.uint8)])

    def _row(self, peer: int, rank: int) -> Tensor:
        """Return the row of neighbour ``peer`` for ``rank``."""
        row, start = self.rows[rank], self._starts[rank]
        return self._laid[peer][start : start + row.nbytes].view(row.dtype)

    def _settle(self, post: Post) -> None:
        if self.near or self.places:
            return
        if self.then is not None:
            then, self.then = self.then, None
            then(post, self._trouble)
        else:
            self.found.put(self._trouble or (self.routes.rank, None))
