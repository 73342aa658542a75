"""Gathers and means among ranks of one host, through memory that all of them can read.

A rank writes the data for its peers into its own memory and sends each peer a *record*. In
``wait``, each peer copies or adds up directly from that memory. A record also says what its sender
has finished reading, so memory is free again some records later. If no range is free, the memory
grows: no rank waits before writing. It never shrinks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.comm.arena import Arena
from fullshard.comm.local_peer import FAILED, LocalPeer, LocalPeers, Record
from fullshard.comm.means import put_mean
from fullshard.comm.memory import Memory, aligned
from fullshard.comm.protocol import Pending, Splits, Then, put
from fullshard.errors import LostRankError, ProtocolError


class Shared:
    """The exchanges of one process group whose ranks share a host."""

    adds_wide = True

    def __init__(self, rank: int, memory: Memory, peers: LocalPeers) -> None:
        self.peers = peers
        self._rank = rank
        self._ranks = list(peers.by_rank)
        self._world = 1 + len(self._ranks)
        # This rank is a reader, too, as a mean includes its own data.
        self._arena = Arena(memory, num_readers=self._world)
        self._num_started = 0
        self._over: list[
            tuple[int, set[int]]
        ] = []  # exchanges that we have read, not yet announced to peers
        # The signatures of exchanges: the number by which peers know a signature, and its text.
        self._signatures: dict[tuple[str, torch.dtype, str], tuple[int, str]] = {}
        self._known: set[int] = set()  # the numbers of signatures that peers know

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
        return Then(None, partial(_end_gather, exchange, starts, rows))

    def reduce_scatter_mean(
        self, group: dist.ProcessGroup, output: Tensor, source: Tensor, label: str
    ) -> Pending:
        """See ``Collectives.reduce_scatter_mean``."""
        rows = source.view(self._world, -1)
        nbytes = aligned(rows[0].nbytes)
        others = [(r * nbytes, rows[r]) for r in self._ranks]  # no peer reads our own row
        exchange = self._start("reduction", label, self._world * nbytes, others)
        own = rows[self._rank]
        return Then(None, partial(_end_reduction, exchange, self._rank * nbytes, own, output))

    def all_reduce_mean(self, group: dist.ProcessGroup, values: Tensor, label: str) -> Pending:
        """See ``Collectives.all_reduce_mean``; all ranks add up all values in the same order."""
        exchange = self._start("mean", label, aligned(values.nbytes), [(0, values)])
        return Then(None, partial(_end_mean, exchange, self._rank, values))

    def all_to_all(
        self,
        group: dist.ProcessGroup,
        output: Tensor,
        source: Tensor,
        label: str,
        splits: Splits | None = None,
    ) -> Pending:
        """See ``Collectives.all_to_all``; tensors are of bytes, ``splits`` gives unequal slices.

        A rank writes a table with the start and length of each slice, then the slices themselves.
        """
        lengths, sizes = splits or [[len(source) // self._world] * self._world] * 2
        starts, places = [[0, *accumulate(these)] for these in (lengths, sizes)]
        table = torch.tensor([starts[:-1], lengths], device="cpu").T.contiguous().view(torch.uint8)
        head = aligned(table.nbytes)
        pieces = [(0, table.view(-1))]
        pieces += [(head + starts[r], source[starts[r] : starts[r + 1]]) for r in self._ranks]
        exchange = self._start("exchange", label, head + source.nbytes, pieces)
        rows = [output[start : start + size] for start, size in zip(places, sizes, strict=False)]
        put(source[starts[self._rank] : starts[self._rank + 1]], rows[self._rank])
        return Then(None, partial(_end_exchange, exchange, self._rank, head, rows))

    def _start(
        self, kind: str, label: str, nbytes: int, pieces: Sequence[tuple[int, Tensor]]
    ) -> HostExchange:
        """Write ``pieces``, each at its offset in bytes, into our memory and notify the peers."""
        exchange = self.lay(kind, label, nbytes, pieces, pieces[0][1].dtype)
        exchange.publish()
        return exchange

    def lay(
        self,
        kind: str,
        label: str,
        nbytes: int,
        pieces: Sequence[tuple[int, Tensor]],
        dtype: torch.dtype,
    ) -> HostExchange:
        """Begin an exchange of ``nbytes`` of this rank, and write ``pieces`` into our memory.

        Peers read once its ``publish`` was called. All ranks begin exchanges in the same order.
        """
        number, self._num_started = self._num_started, self._num_started + 1
        over = self._end_exchanges()
        self._arena.count_acks(self._taken_acks())
        start, laid = self._arena.allocate(number, nbytes, self._read)
        for offset, piece in pieces:
            laid[offset : offset + piece.nbytes].view(piece.dtype).copy_(piece)
        about = (kind, dtype, label)
        if about not in self._signatures:
            self._signatures[about] = (len(self._signatures), signature_of(*about))
        which, signature = self._signatures[about]
        is_known = which in self._known
        record = Record(number, start, nbytes, which, over, "" if is_known else signature)
        return HostExchange(record, signature, laid, self.peers, self._over, self._known)

    def _end_exchanges(self) -> tuple[int, ...]:
        """Release the exchanges that we finished since the last call, and return their numbers."""
        # Garbage collection in any thread may end more exchanges while this runs.
        ended = [self._over.pop() for _ in range(len(self._over))]
        for number, missing in ended:
            for rank in missing:
                self.peers.by_rank[rank].discard(number)
        over = tuple(number for number, _ in ended)
        self._arena.count_acks(over)
        return over

    def _read(self) -> list[int]:
        """Receive what there is; return the exchanges that peers are done with.

        Without this, a rank that never waits would never learn who is done.
        """
        self.peers.receive()
        return self._taken_acks()

    def _taken_acks(self) -> list[int]:
        return [number for one in self.peers.by_rank.values() for number in one.taken_acks()]


class HostExchange:
    """An exchange in flight; it ends with ``close``, or when nothing refers to it any more."""

    def __init__(
        self,
        record: Record,
        signature: str,
        laid: Tensor,
        peers: LocalPeers,
        over: list[tuple[int, set[int]]],
        known: set[int],
    ) -> None:
        self._record = record
        self.signature = signature
        self.laid = laid
        """This rank's bytes, valid until the exchange is over."""
        self._peers = peers
        self._missing = {*peers.by_rank}  # the ranks whose data was not taken
        self._known = known
        self.close = weakref.finalize(self, over.append, (record.number, self._missing))

    def publish(self, failure: str = "") -> None:
        """Send the peers the record of our bytes, or of a failure; call once, from any thread."""
        record = self._record
        if failure:
            record = record._replace(nbytes=0, signature=FAILED, text=failure)
        self._peers.send(record.packed())
        if not failure:
            self._known.add(record.signature)

    def missing(self) -> list[LocalPeer]:
        """Return the peers whose data was neither taken nor has arrived."""
        number = self._record.number
        peers = [self._peers.by_rank[rank] for rank in self._missing]
        return [peer for peer in peers if not peer.has_published(number)]

    def read(
        self, *, alike: bool = True, wait: Callable[[Sequence[LocalPeer], str], None] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield each peer's rank and bytes, without a copy, in the order of arrival.

        Args:
            alike: True if all ranks lay equally many bytes.
            wait: waits for a record; None: ``LocalPeers.wait``.

        Raises:
            ProtocolError: if a peer runs a different collective.
            LostRankError: if a peer is gone, or all missing peers are silent for the time-out.
            PeerError: the error of the fault that ended the era.
        """
        number, own_nbytes = self._record.number, self._record.nbytes
        by_rank, wait = self._peers.by_rank, wait or self._peers.wait
        while self._missing:
            for rank in [one for one in by_rank if one in self._missing]:
                peer = by_rank[rank]
                if not peer.has_published(number):
                    continue
                self._missing.remove(rank)
                record, laid = peer.laid(number)
                if record.signature == FAILED:
                    raise LostRankError(f"rank {rank} of the process group failed: {record.text}")
                signature = peer.signature_of(record)
                nbytes = own_nbytes if alike else record.nbytes
                if (record.nbytes, signature) != (nbytes, self.signature):
                    raise ProtocolError(
                        f"exchange {number} of this host differs: rank {rank} of the process "
                        f"group runs {_described(record, signature)}; this rank runs "
                        f"{_described(self._record, self.signature)}. All ranks must run the "
                        "same units of the same model in the same order"
                    )
                yield rank, laid
            if waited_for := self.missing():
                wait(waited_for, self.text())

    def text(self) -> str:
        """Return words for messages."""
        return f"exchange {self._record.number} ({_described(self._record, self.signature)})"


def signature_of(kind: str, dtype: torch.dtype, label: str) -> str:
    """Return the text that ranks compare and that error messages show."""
    return f"{kind} of {str(dtype).removeprefix('torch.')}" + (f" for {label}" if label else "")


def _described(record: Record, signature: str) -> str:
    return f"{signature}, {record.nbytes} bytes"


def _end_gather(exchange: HostExchange, starts: list[int], rows: list[Tensor]) -> None:
    """Copy the shards of all peers, which begin at ``starts``, to their places in ``rows``."""
    for rank, laid in exchange.read():
        for start, row in zip(starts, rows, strict=True):
            target = row[rank]
            target.copy_(laid[start : start + target.nbytes].view(target.dtype))
    exchange.close()


def _end_reduction(exchange: HostExchange, start: int, own: Tensor, output: Tensor) -> None:
    """Write the mean of ``own`` and the peers' rows, which begin at ``start``, into ``output``."""
    end = start + own.nbytes
    received = {rank: laid[start:end].view(own.dtype) for rank, laid in exchange.read()}
    put_mean(output, own, [received[rank] for rank in sorted(received)])
    exchange.close()


def _end_mean(exchange: HostExchange, own_rank: int, values: Tensor) -> None:
    """Replace ``values`` by the mean over all ranks, added up in the order of ranks."""
    laid = {own_rank: exchange.laid, **dict(exchange.read())}
    first, *others = (laid[rank][: values.nbytes].view(values.dtype) for rank in sorted(laid))
    put_mean(values, first, others)
    exchange.close()


def _end_exchange(exchange: HostExchange, own_rank: int, head: int, rows: Sequence[Tensor]) -> None:
    """Copy the slices for this rank, as the tables at the start of all peers' bytes say."""
    entry = slice(16 * own_rank, 16 * own_rank + 16)
    for rank, laid in exchange.read(alike=False):
        start, length = laid[entry].view(torch.int64).tolist()
        if length != len(rows[rank]):
            raise ProtocolError(
                f"an exchange: rank {rank} of the process group sent {length} bytes to rank "
                f"{own_rank}, which expected {len(rows[rank])}"
            )
        start += head
        rows[rank].copy_(laid[start : start + length])
    exchange.close()
