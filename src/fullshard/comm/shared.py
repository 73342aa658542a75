"""Gathers and means among ranks of one host, through memory that all of them can read.

A rank writes the data for its peers into its own memory and sends each peer a *notice*. In
``wait``, each peer copies or adds up directly from that memory. A notice also says what its sender
has finished reading, so memory is free again some notices later. If no range is free, the memory
grows: no rank waits before writing, and the memory holds little more than the data in flight.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.comm.fault_domain import fault_domain
from fullshard.comm.means import put_mean
from fullshard.comm.memory import Memory, aligned
from fullshard.comm.neighbours import Neighbour, Notice, wait_for
from fullshard.comm.protocol import Pending, Splits, even_splits, put
from fullshard.comm.shelf import Shelf
from fullshard.errors import LostRankError, ProtocolError


class Shared:
    """The exchanges of one process group whose ranks share a host."""

    adds_wide = True

    def __init__(self, rank: int, memory: Memory, neighbours: Mapping[int, Neighbour]) -> None:
        self._rank = rank
        self._world = 1 + len(neighbours)
        # This rank is a reader, too, as a mean includes its own data.
        self._shelf = Shelf(memory, num_readers=self._world)
        self._neighbours = neighbours
        self._num_started = 0
        self._over: list[int] = []  # exchanges that we have read, not yet announced to peers
        # The subjects of exchanges: the number by which peers know a subject, and its text.
        self._subjects: dict[tuple[str, torch.dtype, str], tuple[int, str]] = {}

    def all_gather(
        self,
        group: dist.ProcessGroup,
        outputs: Sequence[Tensor],
        sources: Sequence[Tensor],
        label: str,
    ) -> Pending:
        """See ``Collectives.all_gather``."""
        ends = list(accumulate(aligned(source.nbytes) for source in sources))
        starts = [0, *ends[:-1]]
        pieces = list(zip(starts, sources, strict=True))
        exchange = self._start("gather", label, ends[-1], pieces)
        rows = [output.view(self._world, -1) for output in outputs]
        for row, source in zip(rows, sources, strict=True):
            put(source, row[self._rank])
        return _Gather(exchange, starts, rows)

    def reduce_scatter_mean(
        self, group: dist.ProcessGroup, output: Tensor, source: Tensor, label: str
    ) -> Pending:
        """See ``Collectives.reduce_scatter_mean``."""
        rows = source.view(self._world, -1)
        nbytes = aligned(rows[0].nbytes)
        others = [(r * nbytes, rows[r]) for r in self._neighbours]  # no peer reads our own row
        exchange = self._start("reduction", label, self._world * nbytes, others)
        return _Mean(exchange, self._rank * nbytes, rows[self._rank], output)

    def all_reduce_mean(self, group: dist.ProcessGroup, values: Tensor, label: str) -> Pending:
        """See ``Collectives.all_reduce_mean``; all ranks add up all values in the same order."""
        exchange = self._start("mean", label, aligned(values.nbytes), [(0, values)])
        return _MeanOfAll(exchange, self._rank, values)

    def all_to_all(
        self,
        group: dist.ProcessGroup,
        output: Tensor,
        source: Tensor,
        label: str,
        splits: Splits | None = None,
    ) -> Pending:
        """See ``Collectives.all_to_all``; of bytes, and with ``splits`` in slices unlike in size.

        In front of its slices, which start one after the other, a rank lays where each begins.
        """
        lengths, sizes = splits or even_splits(source, self._world)
        starts, places = [[0, *accumulate(these)] for these in (lengths, sizes)]
        table = torch.tensor([starts[:-1], lengths], device="cpu").T.contiguous().view(torch.uint8)
        head = aligned(table.nbytes)
        pieces = [(0, table.view(-1))]
        pieces += [(head + starts[r], source[starts[r] : starts[r + 1]]) for r in self._neighbours]
        exchange = self._start("exchange", label, head + source.nbytes, pieces)
        rows = [output[start : start + size] for start, size in zip(places, sizes, strict=False)]
        put(source[starts[self._rank] : starts[self._rank + 1]], rows[self._rank])
        return _Exchanged(exchange, self._rank, head, rows)

    def _start(
        self, kind: str, label: str, nbytes: int, pieces: Sequence[tuple[int, Tensor]]
    ) -> _Exchange:
        """Write ``pieces``, each at its offset in bytes, into our memory and notify the peers."""
        number, self._num_started = self._num_started, self._num_started + 1
        over = self._end_exchanges()
        self._shelf.count_done(self._taken_done())
        start, laid = self._shelf.lay(number, nbytes, self._read)
        for offset, piece in pieces:
            laid[offset : offset + piece.nbytes].view(piece.dtype).copy_(piece)
        about = (kind, pieces[0][1].dtype, label)
        is_new = about not in self._subjects
        if is_new:
            self._subjects[about] = (len(self._subjects), subject_of(*about))
        which, subject = self._subjects[about]
        notice = Notice(number, start, nbytes, which, over, subject if is_new else "")
        packed = notice.packed()
        for neighbour in self._neighbours.values():
            neighbour.tell(packed)
        return _Exchange(notice, subject, laid, self._neighbours, self._over)

    def _end_exchanges(self) -> tuple[int, ...]:
        """Release the exchanges that we finished since the last call, and return their numbers."""
        # Garbage collection in any thread may end more exchanges while this runs.
        over = tuple(self._over.pop() for _ in range(len(self._over)))
        for number in over:
            for neighbour in self._neighbours.values():
                neighbour.forget(number)
        self._shelf.count_done(over)
        return over

    def _read(self) -> list[int]:
        """Receive what there is; return the exchanges that peers are done with."""
        for neighbour in self._neighbours.values():
            # Without this, a rank that never waits would never learn who is done. A lost rank
            # matters only to those who wait for that rank.
            with contextlib.suppress(LostRankError):
                neighbour.receive()
        return self._taken_done()

    def _taken_done(self) -> list[int]:
        return [number for one in self._neighbours.values() for number in one.taken_done()]


class _Exchange:
    """An exchange in flight, over when all data was read or nothing refers to it anymore."""

    def __init__(
        self,
        notice: Notice,
        subject: str,
        laid: Tensor,
        neighbours: Mapping[int, Neighbour],
        over: list[int],
    ) -> None:
        self._era = fault_domain().era
        self._notice = notice
        self._subject = subject
        self.laid = laid
        """This rank's bytes, valid until the exchange is over."""
        self._neighbours = neighbours
        self.close = weakref.finalize(self, over.append, notice.number)

    def read(self, *, alike: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Yield each peer's rank and bytes, without a copy, in the order of arrival.

        Args:
            alike: True if all ranks lay equally many bytes.

        Raises:
            ProtocolError: if a peer runs a different collective.
            LostRankError: if a peer is gone, or silent for longer than the group's time-out.
            PeerError: the error of the fault that ended the era.
        """
        number, own_nbytes = self._notice.number, self._notice.nbytes
        missing = dict(self._neighbours)
        while missing:
            for rank, peer in self._neighbours.items():
                if rank in missing and peer.has_laid(number):
                    del missing[rank]
                    notice, laid = peer.laid(number)
                    subject = peer.subject_of(notice)
                    nbytes = own_nbytes if alike else notice.nbytes
                    if (notice.nbytes, subject) != (nbytes, self._subject):
                        raise ProtocolError(
                            f"collective {number} of the process group is a "
                            f"{_described(notice, subject)}, on rank {rank} of it and a "
                            f"{_described(self._notice, self._subject)}, on this rank: they run "
                            "different units or different models, or in another order"
                        )
                    yield rank, laid
            if missing:
                wait_for(
                    missing.values(),
                    self._era,
                    f"collective {number}, a {_described(self._notice, self._subject)}",
                )


def subject_of(kind: str, dtype: torch.dtype, label: str) -> str:
    """Return the text that ranks compare and that error messages show."""
    return f"{kind} of {str(dtype).removeprefix('torch.')}" + (f" for {label}" if label else "")


def _described(notice: Notice, subject: str) -> str:
    return f"{subject}, {notice.nbytes} bytes"


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


class _Exchanged:
    def __init__(self, exchange: _Exchange, rank: int, head: int, rows: Sequence[Tensor]) -> None:
        self._exchange = exchange
        self._rank = rank
        self._head = head
        self._rows = rows

    def wait(self) -> None:
        entry = slice(16 * self._rank, 16 * self._rank + 16)
        for rank, laid in self._exchange.read(alike=False):
            start, length = laid[entry].view(torch.int64).tolist()
            if length != len(self._rows[rank]):
                raise ProtocolError(
                    f"an exchange: rank {rank} of the process group sent {length} bytes to rank "
                    f"{self._rank}, which expected {len(self._rows[rank])}"
                )
            start += self._head
            self._rows[rank].copy_(laid[start : start + length])
        self._exchange.close()
