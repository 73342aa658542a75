"""Gathers and means among ranks of one host, through memory that all of them can read.

A rank lays out what its peers are to read in a *slot* of its own and sends each peer a *notice*.
Whoever waits copies, or adds up, straight out of its peers' slots. A notice tells as well what its
sender has read, so a slot is free again some notices later; where none is, there is another one:
nobody waits before writing, and there are few more slots than exchanges in flight.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch.distributed as dist
from torch import Tensor

from fullshard.comm.means import put_mean
from fullshard.comm.neighbours import Memory, Neighbour, Notice, neighbours_in
from fullshard.comm.protocol import Pending, put
from fullshard.errors import ProtocolError

__all__ = ["Shared"]

_ALIGNMENT = 64


class _Kind(enum.IntEnum):
    """What an exchange is for; errors call it by its name."""

    gather = 0
    reduction = 1
    mean = 2


class Shared:
    """The exchanges of one process group whose ranks share a host."""

    def __init__(self, rank: int, neighbours: dict[int, Neighbour]) -> None:
        self._rank = rank
        self._world = 1 + len(neighbours)
        self._neighbours = neighbours
        self._slots: list[_Slot] = []
        self._laid: dict[int, _Slot] = {}  # what somebody has still to read, by exchange
        self._num_started = 0
        self._done: list[int] = []  # what we have read, and nobody knows yet

    @classmethod
    def within(cls, group: dist.ProcessGroup) -> Shared | None:
        """Meet the other ranks of ``group``; None on all of them if any is on another host."""
        neighbours = neighbours_in(group)
        return None if neighbours is None else cls(group.rank(), neighbours)

    def all_gather(
        self, group: dist.ProcessGroup, outputs: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Pending:
        """See ``Collectives.all_gather``."""
        ends = list(accumulate(_aligned(source.nbytes) for source in sources))
        starts = [0, *ends[:-1]]
        pieces = list(zip(starts, sources, strict=True))
        exchange = self._start(_Kind.gather, ends[-1], pieces)
        rows = [output.view(self._world, -1) for output in outputs]
        for row, source in zip(rows, sources, strict=True):
            put(source, row[self._rank])
        return _Gather(exchange, starts, rows)

    def reduce_scatter_mean(
        self, group: dist.ProcessGroup, output: Tensor, source: Tensor
    ) -> Pending:
        """See ``Collectives.reduce_scatter_mean``."""
        rows = source.view(self._world, -1)
        nbytes = _aligned(rows[0].nbytes)
        others = [(r * nbytes, rows[r]) for r in self._neighbours]  # nobody reads our own
        exchange = self._start(_Kind.reduction, self._world * nbytes, others)
        return _Mean(exchange, self._rank * nbytes, rows[self._rank], output)

    def all_reduce_mean(self, group: dist.ProcessGroup, values: Tensor) -> Pending:
        """See ``Collectives.all_reduce_mean``; every rank adds up all, in the same order."""
        exchange = self._start(_Kind.mean, _aligned(values.nbytes), [(0, values)])
        return _MeanOfAll(exchange, self._rank, values)

    def _start(self, kind: _Kind, nbytes: int, pieces: Sequence[tuple[int, Tensor]]) -> _Exchange:
        """Lay out ``pieces``, each at its offset in bytes, and tell the neighbours."""
        number, self._num_started = self._num_started, self._num_started + 1
        slot = self._laid[number] = self._free_slot(nbytes)
        slot.num_readers = len(self._neighbours)
        slot.memory.reserve(nbytes)
        laid = slot.memory.bytes
        for start, piece in pieces:
            laid[start : start + piece.nbytes].view(piece.dtype).copy_(piece)
        done = tuple(self._done.pop() for _ in range(len(self._done)))
        notice = Notice(number, kind, nbytes, self._slots.index(slot), done)
        for neighbour in self._neighbours.values():
            neighbour.tell(notice, slot.memory)
        return _Exchange(notice, laid, self._neighbours, self._done)

    def _free_slot(self, nbytes: int) -> _Slot:
        """The smallest that suffices, else the largest, which grows; a new one if none is free."""
        for neighbour in self._neighbours.values():
            for number in neighbour.taken_done():
                self._laid[number].num_readers -= 1
                if not self._laid[number].num_readers:
                    del self._laid[number]
        free = [slot for slot in self._slots if not slot.num_readers]
        if not free:
            self._slots.append(_Slot(Memory()))
            return self._slots[-1]
        free.sort(key=lambda slot: slot.memory.bytes.numel())
        return next((slot for slot in free if slot.memory.bytes.numel() >= nbytes), free[-1])


class _Slot:
    """Memory that peers read, and how many of them have not yet."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.num_readers = 0


class _Exchange:
    """One of several in flight, over when everything was read or nobody wants it any more."""

    def __init__(
        self, notice: Notice, laid: Tensor, neighbours: dict[int, Neighbour], done: list[int]
    ) -> None:
        self._notice = notice
        self.laid = laid
        """The bytes of this rank, until the exchange is over."""
        self._neighbours = neighbours
        self.close = weakref.finalize(self, done.append, notice.number)

    def read(self) -> Iterator[tuple[int, Tensor]]:
        """The bytes of each peer, as they are there, by its rank.

        Raises:
            ProtocolError: a peer runs another collective.
            LostRankError: a peer is gone, or silent for longer than the group's time-out.
        """
        own = self._notice
        for rank, neighbour in self._neighbours.items():
            notice, laid = neighbour.laid_out(own.number)
            if (notice.kind, notice.nbytes) != (own.kind, own.nbytes):
                raise ProtocolError(
                    f"collective {own.number} of the process group is a {_described(notice)} on "
                    f"rank {rank} of it and a {_described(own)} on this rank: they run different "
                    "units or different models, or in another order"
                )
            yield rank, laid


def _described(notice: Notice) -> str:
    return f"{_Kind(notice.kind).name} of {notice.nbytes} bytes"


class _Gather:
    def __init__(self, exchange: _Exchange, starts: list[int], rows: list[Tensor]) -> None:
        self._exchange = exchange
        self._starts = starts
        self._rows = rows

    def wait(self) -> None:
        for rank, laid in self._exchange.read():
            for start, row in zip(self._starts, self._rows, strict=True):
                target = row[rank]
                target.copy_(laid[start : start + target.nbytes].view(target.dtype))
        self._exchange.close()


class _Mean:
    def __init__(self, exchange: _Exchange, start: int, own: Tensor, output: Tensor) -> None:
        self._exchange = exchange
        self._start = start
        self._own = own
        self._output = output

    def wait(self) -> None:
        end = self._start + self._own.nbytes
        received = {
            rank: laid[self._start : end].view(self._own.dtype)
            for rank, laid in self._exchange.read()
        }
        put_mean(self._output, self._own, [received[rank] for rank in sorted(received)])
        self._exchange.close()


class _MeanOfAll:
    def __init__(self, exchange: _Exchange, rank: int, values: Tensor) -> None:
        self._exchange = exchange
        self._rank = rank
        self._values = values

    def wait(self) -> None:
        nbytes, dtype = self._values.nbytes, self._values.dtype
        laid = {self._rank: self._exchange.laid, **dict(self._exchange.read())}
        first, *others = (laid[rank][:nbytes].view(dtype) for rank in sorted(laid))
        put_mean(self._values, first, others)
        self._exchange.close()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
