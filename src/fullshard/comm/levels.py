"""Gathers and means among hosts: within a host through memory, and once between any two hosts.

Each host receives every shard of the others once: the owner sends it to one rank there, its agent,
into memory that the agent's neighbours read. A reduction sends each rank one row from each other
host, the sum of the rows there in fp32 or wider. A mean over replicas is a reduction of slices and
a gather of them. Which rank is an agent for which, see ``Routes``.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.comm.courier import Courier
from fullshard.comm.crossing import Area, Crossing, Gather, Post, Reduction
from fullshard.comm.links import HostLink, Trouble
from fullshard.comm.means import put_mean
from fullshard.comm.memory import Memory, aligned
from fullshard.comm.neighbours import Line, Notice
from fullshard.comm.office import Office
from fullshard.comm.protocol import Pending, put
from fullshard.comm.routes import Routes
from fullshard.comm.shared import subject_of
from fullshard.comm.shelf import Shelf


class Levels:
    """The exchanges of one process group whose ranks are in several circles."""

    adds_wide = True

    def __init__(
        self,
        routes: Routes,
        memory: Memory | None,
        lines: Mapping[int, Line],
        links: Mapping[int, HostLink],
        timeout_s: float,
    ) -> None:
        """``memory`` is None for a rank without neighbours, which has no ``lines`` either."""
        self._routes = routes
        self._lines = lines
        # An exchange ends twice on each rank: for who waits for it, and for who carries it on.
        self._shelf = None if memory is None else Shelf(memory, 2 * len(routes.own))
        self._office = Office(lines, links)
        self._courier = Courier(self._office, timeout_s)
        self._num_started = 0
        self._over: list[int] = []  # exchanges that are over here, not yet told to neighbours
        self._subjects: dict[str, int] = {}  # the numbers by which neighbours know subjects
        weakref.finalize(self, self._courier.close, os.getpid())

    def all_gather(
        self,
        group: dist.ProcessGroup,
        outputs: Sequence[Tensor],
        sources: Sequence[Tensor],
        label: str,
    ) -> Pending:
        """See ``Collectives.all_gather``."""
        rows = [output.view(self._routes.world, -1) for output in outputs]
        targets = [list(map(_bytes_of, parts)) for parts in zip(*rows, strict=True)]
        pieces = list(map(_bytes_of, sources))
        nbytes = sum(piece.nbytes for piece in pieces)
        subject = _subject("gather", sources[0].dtype, label, nbytes)
        number, areas = self._areas(subject, targets, pieces)
        for piece, target in zip(pieces, targets[self._routes.rank], strict=True):
            put(piece, target)
        gather = Gather(number, subject, self._routes, areas, is_ready=True)
        self._courier.start(gather)
        return _Gathered(self, gather, targets)

    def reduce_scatter_mean(
        self, group: dist.ProcessGroup, output: Tensor, source: Tensor, label: str
    ) -> Pending:
        """See ``Collectives.reduce_scatter_mean``."""
        rows = source.view(self._routes.world, -1).unbind()
        reduction = self._reduction(_subject("reduction", source.dtype, label, source.nbytes), rows)
        self._courier.start(reduction)
        return _Mean(self, reduction, rows[self._routes.rank], output)

    def all_reduce_mean(self, group: dist.ProcessGroup, values: Tensor, label: str) -> Pending:
        """See ``Collectives.all_reduce_mean``; one rank adds up each slice, so bits are equal."""
        rank, world = self._routes.rank, self._routes.world
        length = -(-values.numel() // world)
        rows = values.tensor_split([length * r for r in range(1, world)])
        subject = _subject("mean", values.dtype, label, values.nbytes)
        reduction = self._reduction(subject, rows)
        self.close(reduction)  # nobody waits for this half of the mean
        number, areas = self._areas(subject, [[_bytes_of(row)] for row in rows])
        gather = Gather(number, subject, self._routes, areas, is_ready=False)

        def finish(post: Post, trouble: Trouble | None) -> None:
            if trouble is None:
                own = reduction.rows[rank]
                result = areas[rank].places[0].view(own.dtype)
                put_mean(result, own, reduction.parts(), terms=world)
            gather.take_own(post, trouble)

        reduction.then = finish
        self._courier.start(reduction, gather)
        return _Gathered(self, gather, [[_bytes_of(row)] for row in rows])

    def finds(self, crossing: Crossing) -> Iterator[tuple[int, Tensor | None]]:
        """See ``Courier.finds``."""
        return self._courier.finds(crossing)

    def close(self, crossing: Crossing) -> None:
        """Take note that nobody on this rank waits for ``crossing`` anymore."""
        self._office.over.append(crossing.number)

    def _areas(
        self,
        subject: str,
        targets: Sequence[Sequence[Tensor]],
        own: Sequence[Tensor] | None = None,
    ) -> tuple[int, dict[int, Area]]:
        """Begin a gather into ``targets``, by rank; return its number and its areas, by rank.

        Neighbours are told of ``own``, the pieces of this rank, unless they come later.
        """
        routes, here = self._routes, (self._routes.rank, *self._routes.outsiders)
        if self._shelf is None:
            areas = {rank: Area(0, None, list(targets[rank])) for rank in here}
            if own is not None:
                areas[routes.rank] = Area(0, None, list(own))
            return self._counted(), areas
        starts, nbytes = _laid_out(targets[0])  # rank 0 has as much as any
        number, start, laid = self._begin(len(here) * nbytes)
        areas = {}
        for i, rank in enumerate(here):
            memory = laid[i * nbytes : (i + 1) * nbytes]
            places = [memory[s : s + t.nbytes] for s, t in zip(starts, targets[rank], strict=True)]
            areas[rank] = Area(start + i * nbytes, memory, places)
        if own is not None:
            for place, piece in zip(areas[routes.rank].places, own, strict=True):
                place.copy_(piece)
            self._tell(number, start, nbytes, subject)
        return number, areas

    def _reduction(self, subject: str, rows: Sequence[Tensor]) -> Reduction:
        """Begin a reduction; neighbours are told of ``rows``."""
        starts, nbytes = _laid_out([rows[0]] * len(rows))  # no row is longer
        if self._shelf is None:
            return Reduction(self._counted(), subject, self._routes, rows, starts)
        number, start, laid = self._begin(nbytes)
        places = [
            laid[s : s + row.nbytes].view(row.dtype) for s, row in zip(starts, rows, strict=True)
        ]
        for place, row in zip(places, rows, strict=True):
            place.copy_(row)
        self._tell(number, start, nbytes, subject)
        return Reduction(number, subject, self._routes, places, starts)

    def _counted(self) -> int:
        if self._shelf is None:
            self._office.over.clear()
        number, self._num_started = self._num_started, self._num_started + 1
        return number

    def _begin(self, nbytes: int) -> tuple[int, int, Tensor]:
        """Take memory for an exchange; return its number, the start of the memory, and the memory.

        The memory of exchanges that all have read is free again.
        """
        assert self._shelf is not None
        over = _taken(self._office.over)
        self._over += over
        self._shelf.count_done([*over, *_taken(self._office.read)])
        number = self._counted()
        start, laid = self._shelf.lay(number, nbytes, lambda: _taken(self._office.read))
        return number, start, laid

    def _tell(self, number: int, start: int, nbytes: int, subject: str) -> None:
        """Tell neighbours of our bytes for an exchange, and which exchanges are over here."""
        over, self._over = tuple(self._over), []
        is_new = subject not in self._subjects
        which = self._subjects.setdefault(subject, len(self._subjects))
        notice = Notice(number, start, nbytes, which, over, subject if is_new else "")
        packed = notice.packed()
        for line in self._lines.values():
            line.tell(packed)


class _Gathered:
    """A gather in flight; over for this rank when it is waited for, or nothing refers to it."""

    def __init__(self, levels: Levels, gather: Gather, targets: Sequence[Sequence[Tensor]]) -> None:
        self._levels = levels
        self._gather = gather
        self._targets = targets
        self._close = weakref.finalize(self, levels.close, gather)

    def wait(self) -> None:
        starts, _ = _laid_out(self._targets[0])
        for rank, laid in self._levels.finds(self._gather):
            if laid is not None:
                for start, target in zip(starts, self._targets[rank], strict=True):
                    target.copy_(laid[start : start + target.nbytes])
        self._close()


class _Mean:
    """A reduction in flight; over for this rank when it is waited for, or nothing refers to it."""

    def __init__(self, levels: Levels, reduction: Reduction, own: Tensor, output: Tensor) -> None:
        self._levels = levels
        self._reduction = reduction
        self._own = own
        self._output = output
        self._close = weakref.finalize(self, levels.close, reduction)

    def wait(self) -> None:
        for _ in self._levels.finds(self._reduction):
            pass
        world = self._reduction.routes.world
        put_mean(self._output, self._own, self._reduction.parts(), terms=world)
        self._close()


def _subject(kind: str, dtype: torch.dtype, label: str, nbytes: int) -> str:
    """Return the text that ranks compare and that error messages show."""
    return f"{subject_of(kind, dtype, label)}, {nbytes} bytes"


def _bytes_of(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


def _laid_out(parts: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the offsets of ``parts`` one after the other in memory, and the end of the last."""
    ends = list(accumulate(aligned(part.nbytes) for part in parts))
    return [0, *ends[:-1]], ends[-1]


def _taken(numbers: deque[int]) -> list[int]:
    """Remove and return what is there; other threads may append meanwhile."""
    return [numbers.popleft() for _ in range(len(numbers))]
