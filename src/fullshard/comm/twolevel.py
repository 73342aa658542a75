"""Gathers and means among hosts of equally many ranks: memory within a host, gloo among hosts.

The ranks of the same index on each host are a *column*. A gather brings the shards of a column to
all its ranks, and each rank reads the other columns from its peers' memory. In a reduction each
rank adds up the rows that its host's ranks hold for its column, in fp32 or wider; then the column
exchanges these sums. In a mean, each rank does the same for one slice of the values, then copies
the other slices from the ranks of its host. So each shard, and each sum, goes once to each other
host.

Columns use gloo groups of their own. A fault breaks these off, and ranks make new ones.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._torch import collectives as _collectives
from fullshard._torch import world as _world
from fullshard.comm.columns import (
    HEAD_NBYTES,
    EventFd,
    InFlight,
    OwnGroups,
    check_head,
    head_of,
    numbers_in,
)
from fullshard.comm.labels import AMONG_HOSTS, Compared
from fullshard.comm.ledger import COMPARISON, ledger_of
from fullshard.comm.liveness import losing_ranks
from fullshard.comm.local_peer import LocalPeer
from fullshard.comm.means import put_mean, put_sum, wide_dtype
from fullshard.comm.memory import aligned
from fullshard.comm.protocol import Done, Pending, Splits, Then, put
from fullshard.comm.shared import HostExchange, Shared, signature_of

__all__ = ["TwoLevels"]


class TwoLevels:
    """The gathers and means of one process group whose ranks are on several hosts.

    This class starts no thread. Once the rows of a host have arrived, its part of a reduction or
    mean is sent when this rank next starts or waits for a collective. Until then others may wait.
    """

    adds_wide = True

    def __init__(
        self, hosts: Sequence[Sequence[int]], rank: int, near: Shared, groups: OwnGroups
    ) -> None:
        """``hosts``: the ranks of each host, equally many; ``near``: the transport in our host."""
        self.hosts = hosts
        self.rank = rank
        self.world = sum(map(len, hosts))
        self.near = near
        self.groups = groups
        self.host = next(h for h, host in enumerate(hosts) if rank in host)
        self.index = hosts[self.host].index(rank)
        self.columns = {one: column for column in zip(*hosts, strict=True) for one in column}
        """The ranks of the column of each rank, in the order of hosts."""
        self.event = EventFd()
        near.peers.also_wait_for(self.event.fileno())
        weakref.finalize(self, _world.end_own_gloo_groups, groups.all(), os.getpid())
        self._compared = Compared("cpu")
        self._last = ""  # the signature of the last collective
        self._sizes_after: dict[str, set[tuple[str, int]]] = {}  # kinds and sizes, by what was last
        self._sums: deque[_HostSum] = deque()  # not yet sent to other hosts, in order

    def all_gather(
        self,
        group: dist.ProcessGroup,
        outputs: Sequence[Tensor],
        sources: Sequence[Tensor],
        label: str,
    ) -> Pending:
        """See ``Collectives.all_gather``."""
        self._begin(group, "gather", sources[0].dtype, label, sum(one.nbytes for one in sources))
        rows = [output.view(self.world, -1) for output in outputs]
        for row, source in zip(rows, sources, strict=True):
            put(source, row[self.rank])
        num_hosts = len(self.hosts)
        ends = list(accumulate(aligned(one.nbytes) for one in sources))
        starts = [HEAD_NBYTES + start for start in (0, *ends[:-1])]
        nbytes = HEAD_NBYTES + ends[-1]
        at = self.host * nbytes
        pieces = [(at + start, one) for start, one in zip(starts, sources, strict=True)]
        exchange = self.near.lay("gather", label, num_hosts * nbytes, pieces, sources[0].dtype)
        slots = exchange.laid.view(num_hosts, -1)
        slots[self.host][:HEAD_NBYTES] = head_of(exchange)
        in_flight = InFlight(self.event, exchange=exchange)
        groups = enumerate(zip(self.groups.gathers, slots, strict=True))
        failure = in_flight.start(
            _collectives.broadcast(of_host, slot, host) for host, (of_host, slot) in groups
        )
        if failure is not None:
            raise failure
        return Then(None, partial(self._end_gather, exchange, in_flight, starts, rows))

    def _end_gather(
        self,
        exchange: HostExchange,
        in_flight: InFlight,
        starts: Sequence[int],
        rows: Sequence[Tensor],
    ) -> None:
        """Copy the shards of each column from the memory of its rank of this host."""
        self.wait_for(exchange, lambda: in_flight)
        for peer, laid in chain([(self.rank, exchange.laid)], exchange.read(wait=self.wait)):
            column = self.columns[peer]
            for rank, slot in zip(column, laid.view(len(column), -1), strict=True):
                if rank == self.rank:
                    continue
                check_head(slot, exchange, rank)
                for start, row in zip(starts, rows, strict=True):
                    target = row[rank]
                    target.copy_(slot[start : start + target.nbytes].view(target.dtype))
        exchange.close()

    def reduce_scatter_mean(
        self, group: dist.ProcessGroup, output: Tensor, source: Tensor, label: str
    ) -> Pending:
        """See ``Collectives.reduce_scatter_mean``."""
        self._begin(group, "reduction", source.dtype, label, source.nbytes)
        rows = source.view(self.world, -1)
        stride = aligned(rows[0].nbytes)
        pieces = [(rank * stride, row) for rank, row in enumerate(rows)]
        exchange = self.near.lay("reduction", label, self.world * stride, pieces, source.dtype)
        starts = [rank * stride for rank in self.columns[self.rank]]
        return self._started(_HostSum(self, exchange, starts, rows[0], output))

    def all_reduce_mean(self, group: dist.ProcessGroup, values: Tensor, label: str) -> Pending:
        """See ``Collectives.all_reduce_mean``; each column adds up one slice, so bits are equal."""
        self._begin(group, "mean", values.dtype, label, values.nbytes)
        host, dtype = self.hosts[self.host], values.dtype
        length = -(-values.numel() // len(host))
        slices = values.tensor_split([length * i for i in range(1, len(host))])
        exchange = self.near.lay("mean", label, aligned(values.nbytes), [(0, values)], dtype)
        nbytes = aligned(length * dtype.itemsize)
        result = self.near.lay("slice of the mean", label, nbytes, [], dtype)
        own = slices[self.index]
        start = min(length * self.index, values.numel()) * dtype.itemsize
        with torch.inference_mode(False):  # a thread of gloo writes, outside of that mode
            place = numbers_in(result.laid, own)
        starts = [start] * len(self.hosts)
        total = self._started(_HostSum(self, exchange, starts, own, place, result))
        of_rank = dict(zip(host, slices, strict=True))
        return Then(total, partial(self._end_mean, of_rank, result))

    def _end_mean(self, of_rank: Mapping[int, Tensor], result: HostExchange) -> None:
        """Copy the slices of the mean, each from the rank of this host that has computed it."""
        for rank, laid in chain([(self.rank, result.laid)], result.read(wait=self.wait)):
            of_rank[rank].copy_(numbers_in(laid, of_rank[rank]))
        result.close()

    def all_to_all(
        self,
        group: dist.ProcessGroup,
        output: Tensor,
        source: Tensor,
        label: str,
        splits: Splits | None = None,
    ) -> Pending:
        """See ``Collectives.all_to_all``; with ``splits``, slices may differ in size."""
        self.drain()
        self._compared.compare(group, label, self.groups.everyone)
        lengths, sizes = splits or ((), ())
        work = _collectives.all_to_all(self.groups.everyone, output, source, sizes, lengths)
        return Then(None, partial(self._end_exchange, work, source))

    def _end_exchange(self, work: Pending | None, source: Tensor) -> None:
        """Wait for ``work``; ``source`` is kept alive until everything is sent."""
        self.drain()
        with losing_ranks(AMONG_HOSTS):
            (work or Done()).wait()

    def break_off(self) -> None:
        """End all waits for other hosts; the groups are of no use afterwards."""
        for group in self.groups.all():
            _collectives.break_off(group)

    def _begin(
        self, group: dist.ProcessGroup, kind: str, dtype: torch.dtype, label: str, nbytes: int
    ) -> None:
        """Compare what the ranks are about to start, if it is new, and go on with reductions.

        A size that is new after the collective before counts as new, too. So a rank that leaves the
        order of the others waits here, and the watch sees it. If it went on, a rank could receive
        more bytes than it expects, and gloo would abort its process.
        """
        self.near.peers.receive()
        self._advance()
        text = signature = f"{signature_of(kind, dtype, label)}, {nbytes} bytes"
        sizes = self._sizes_after.setdefault(self._last, set())
        is_known = self._compared.knows(signature)
        if is_known and (kind, nbytes) not in sizes:
            text = f"{signature} after {self._last}"
        sizes.add((kind, nbytes))
        self._last = signature
        if self._compared.knows(text):
            return
        with ledger_of(group).starting(COMPARISON):
            self.drain()
        self._compared.compare(group, text, self.groups.everyone)

    def drain(self) -> None:
        """Start the exchange between hosts for all reductions and means that wait for it.

        Call it before this rank blocks in another collective: ranks that wait for these reductions
        do not reach that collective, so all would wait for each other.
        """
        while self._sums:
            first = self._sums[0]
            self.wait(first.exchange.missing(), first.exchange.text())

    def _started(self, pending: _HostSum) -> _HostSum:
        self._sums.append(pending)
        self._advance()
        return pending

    def _advance(self) -> None:
        """Go on with the reductions for which all rows of this host are here, in order."""
        while self._sums and not self._sums[0].exchange.missing():
            self._sums.popleft().cross()

    def wait(self, missing: Sequence[LocalPeer], what: str) -> None:
        """Wait until a record comes, or a collective of a column ends; see ``LocalPeers.wait``."""
        self._advance()
        self.near.peers.wait(missing, what)
        self.event.clear()
        self._advance()

    def wait_for(self, exchange: HostExchange, found: Callable[[], InFlight | None]) -> None:
        """Wait until the collectives of the column have ended; ``found`` returns them.

        A reduction or mean starts them only once the data of all ranks of this host has arrived.

        Raises:
            LostRankError: a rank is gone.
            ProtocolError: another rank of this host runs a different collective.
            PeerError: the error of the fault that ended the era.
        """
        while (in_flight := found()) is None or not in_flight.is_over:
            self.wait(exchange.missing() if in_flight is None else [], exchange.text())
        in_flight.check()


class _HostSum:
    """A mean in two stages: sums over the ranks of this host, then over the column."""

    def __init__(
        self,
        levels: TwoLevels,
        exchange: HostExchange,
        starts: Sequence[int],
        like: Tensor,
        output: Tensor,
        result: HostExchange | None = None,
    ) -> None:
        """Publish ``exchange``, and prepare to add up.

        Args:
            levels: the transport.
            exchange: has the numbers of this rank.
            starts: where the numbers for each rank of the column begin, in bytes.
            like: has as many numbers as each of these, and their dtype.
            output: gets the mean.
            result: published once the mean is in ``output``; None: ``wait`` writes the mean.
        """
        self.exchange = exchange
        self._levels = levels
        self._column = levels.columns[levels.rank]
        self._starts = starts
        self._like = like
        self._output = output
        self._result = result
        self._in_flight: InFlight | None = None
        self._failure: BaseException | None = None
        exchange.publish()

    def cross(self) -> None:
        """Add up the numbers of this host, and start to exchange the sums within the column.

        If adding up fails, this rank sends a digest of zeros, so that the column's others raise.
        """
        levels, own, like = self._levels, self._levels.host, self._like
        is_sum = len(levels.columns) > len(self._column)  # else the rows of one rank cross
        dtype = wide_dtype(like.dtype) if is_sum else like.dtype
        end = HEAD_NBYTES + like.numel() * dtype.itemsize
        with torch.inference_mode(False):  # gloo's threads write, outside of that mode
            size = len(self._column), aligned(end)
            sent = torch.zeros(size, dtype=torch.uint8, device="cpu")
            try:
                laid = {levels.rank: self.exchange.laid, **dict(self.exchange.read())}
                self._add_up([laid[rank] for rank in sorted(laid)], sent[:, HEAD_NBYTES:end], dtype)
                sent[:, :HEAD_NBYTES] = head_of(self.exchange)
            except BaseException as failure:
                self._failure = failure.with_traceback(None)
            self.exchange.close()
            received = [row if h == own else torch.empty_like(row) for h, row in enumerate(sent)]
            totals = [row[HEAD_NBYTES:end].view(dtype) for row in received]
            self._put = partial(
                _put_mean_of,
                self._column,
                received,
                self.exchange,
                totals,
                self._output,
                levels.world,
            )
            then = None if self._result is None else self._put
            self._in_flight = InFlight(levels.event, then, self._result)
            groups = enumerate(zip(levels.groups.reductions, received, strict=True))
            works = (
                _collectives.scatter(group, row, [*sent] if host == own else [], host)
                for host, (group, row) in groups
            )
            self._failure = self._in_flight.start(works, self._failure)
            if self._failure is not None and not isinstance(self._failure, Exception):
                raise self._failure

    def _add_up(self, laid: Sequence[Tensor], sums: Tensor, dtype: torch.dtype) -> None:
        """Write the sums over this host into ``sums``, a row for each rank of the column."""
        nbytes, last = self._like.nbytes, -1
        for number, start in enumerate(self._starts):
            if start == last:  # all of the column get the same
                sums[number].copy_(sums[number - 1])
            else:
                first, *others = (
                    one[start : start + nbytes].view(self._like.dtype) for one in laid
                )
                put_sum(sums[number].view(dtype), first, others)
            last = start

    def wait(self) -> None:
        """Wait until the column has exchanged its sums, and the mean is written."""
        self._levels.wait_for(self.exchange, self._found)
        if self._result is None:
            self._put()

    def _found(self) -> InFlight | None:
        if self._failure is not None:
            raise self._failure
        return self._in_flight


def _put_mean_of(
    column: Sequence[int],
    rows: Sequence[Tensor],
    exchange: HostExchange,
    totals: Sequence[Tensor],
    output: Tensor,
    world: int,
) -> None:
    """Write the mean into ``output`` from ``totals``, the sums in ``rows`` from the column."""
    for rank, row in zip(column, rows, strict=True):
        check_head(row, exchange, rank)
    first, *others = totals
    put_mean(output, first, others, terms=world)
