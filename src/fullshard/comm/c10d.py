"""Collectives over ``torch.distributed``: native for NCCL and similar, custom paths for gloo."""

from __future__ import annotations

import copy
import enum
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._torch import collectives as _collectives
from fullshard._torch import device as _device
from fullshard.comm.columns import OwnGroups
from fullshard.comm.heartbeat import clamped
from fullshard.comm.ledger import (
    RENDEZVOUS,
    TRANSFER,
    Entry,
    Era,
    Ledger,
    Mark,
    ledger_of,
)
from fullshard.comm.local_peer import LocalPeer, LocalPeers
from fullshard.comm.native import Native
from fullshard.comm.protocol import Done, Label, Pending, as_real
from fullshard.comm.rendezvous import meet
from fullshard.comm.shared import Shared
from fullshard.comm.twolevel import TwoLevels
from fullshard.errors import ProtocolError

Result = TypeVar("Result")


class Transport(enum.Enum):
    """The transport of gathers, means and exchanges; broadcasts always use the backend."""

    NATIVE = "native"
    """The backend's own collectives."""
    SHARED = "shared"
    """Shared memory within a host (``Shared``), and gloo groups of our own among hosts
    (``TwoLevels``). If hosts have different numbers of ranks, each rank counts as a host. All ranks
    use the backend's own collectives if any rank asks for them or cannot create shared memory. Sums
    are in fp32 or wider in any case."""


class _Way(Protocol):
    """An implementation of gathers and reductions; each object serves one process group."""

    def all_gather(
        self,
        group: dist.ProcessGroup,
        outputs: Sequence[Tensor],
        sources: Sequence[Tensor],
        label: str,
    ) -> Pending: ...

    def reduce_scatter_mean(
        self, group: dist.ProcessGroup, output: Tensor, source: Tensor, label: str
    ) -> Pending: ...

    def all_reduce_mean(self, group: dist.ProcessGroup, values: Tensor, label: str) -> Pending: ...


class _Ways(NamedTuple):
    """The implementations that a group gathers and reduces with; the same on all its ranks."""

    gathers: _Way
    reduces: _Way
    exchanges: Native | Shared


class TransportRequest(NamedTuple):
    """A request for the ways of a group."""

    transport: Transport
    device_type: str = "cpu"
    averages: bool = False
    """True if a mean may be the backend's own; else it is made of a sum."""


class _OfEra(NamedTuple):
    era: Era
    ways: dict[TransportRequest, _Ways]
    numbers: Iterator[int]
    """Numbers of the rendezvous of this group in this era."""


_ways: weakref.WeakKeyDictionary[dist.ProcessGroup, _OfEra]
_ways = weakref.WeakKeyDictionary()


def ways_of(group: dist.ProcessGroup, choice: TransportRequest) -> _Ways:
    """Return the ways of ``group``; the first per choice and era with SHARED is a collective."""
    found, era = _ways.get(group), ledger_of(group).era
    if found is None or found.era is not era:
        found = _ways[group] = _OfEra(era, {}, itertools.count())
    ways = found.ways
    if choice not in ways:
        is_shared = choice.transport is Transport.SHARED
        native = Native(choice.device_type, averages=choice.averages, adds_wide=is_shared)
        ways[choice] = _met(group, found, native) if is_shared else _Ways(native, native, native)
    return ways[choice]


def _met(group: dist.ProcessGroup, of_era: _OfEra, native: Native) -> _Ways:
    """Return the ways of a group over gloo, once its ranks have met; ``native`` for BACKEND."""
    with ledger_of(group).starting(RENDEZVOUS):
        met = meet(group, f"{of_era.era.name}/{next(of_era.numbers)}", of_era.era)
        if met is None:
            return _Ways(native, native, native)
        rank, timeout = group.rank(), _collectives.timeout_of(group, "cpu")
        timeout_s = clamped(timeout.total_seconds())
        if len(met.hosts) > 1:
            own = OwnGroups.of(met.name, met.hosts, rank, timeout)
    peers = [LocalPeer(r, *one, timeout_s) for r, one in met.peers.items()]
    shared = Shared(rank, met.memory, LocalPeers(peers, of_era.era))
    if len(met.hosts) == 1:
        return _Ways(shared, shared, shared)
    levels = TwoLevels(met.hosts, rank, shared, own)
    exchanges = Native(
        "cpu", averages=False, adds_wide=True, carrier=own.everyone, before=levels.drain
    )
    return _Ways(levels, levels, exchanges)


class C10d:
    """The collectives of one process group of two or more ranks, held by a weak reference.

    Destroying a process group must end its threads and connections even if a ``C10d`` still exists.
    """

    def __init__(
        self, group: dist.ProcessGroup, device_type: str, transport: Transport | None = None
    ) -> None:
        self._reference = weakref.ref(group)
        self.rank = group.rank()
        self.world = group.size()
        choice = default_choice(group, device_type)
        self._choice = choice._replace(transport=transport or choice.transport)
        self._label = Label()
        self._ledger = ledger_for(group, device_type)
        self._mark: Callable[[], Mark | None] | None = None
        if self._ledger.aborts is not None:
            self._mark = partial(_device.mark, device_type)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            ProtocolError: if the process group was destroyed.
        """
        group = self._reference()
        if group is None:
            raise ProtocolError(
                "the process group that parameters are sharded over was destroyed; build and "
                "shard the model again after init_process_group"
            )
        return group

    @property
    def adds_wide(self) -> bool:
        """True if sums are in fp32 or wider; a backend's own are in the dtype that travels."""
        return self._choice.transport is Transport.SHARED

    def connect(self) -> None:
        """Connect the ranks, unless they are connected; a collective, as is the first other one."""
        group = self.group
        found = _ways.get(group)
        if self.adds_wide and (found is None or self._choice not in found.ways):
            self._ledger.issue(RENDEZVOUS, "", 0, partial(self._meet, group)).wait()

    def by_sums(self) -> C10d:
        """See ``Collectives.by_sums``."""
        new = copy.copy(self)
        new._choice = new._choice._replace(averages=False)
        return new

    def over(self, group: dist.ProcessGroup) -> C10d:
        """See ``Collectives.over``."""
        new = copy.copy(self)
        new._reference = weakref.ref(group)
        new._ledger = ledger_for(group, self._choice.device_type)
        return new

    def labelled(self, label: Label) -> C10d:
        """See ``Collectives.labelled``."""
        new = copy.copy(self)
        new._label = label
        return new

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """See ``Collectives.all_gather``."""
        if outputs[0].is_complex():
            outputs, sources = list(map(as_real, outputs)), list(map(as_real, sources))
        first = sources[0].nbytes
        nbytes = first if len(sources) == 1 else sum(source.nbytes for source in sources)
        return self._issue(
            "gather", nbytes, partial(self._all_gather, self.group, outputs, sources)
        )

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """See ``Collectives.reduce_scatter_mean``."""
        output, source = as_real(output), as_real(source)
        start = partial(self._reduce_scatter_mean, self.group, output, source)
        return self._issue("reduction", source.nbytes, start)

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """See ``Collectives.all_reduce_mean``."""
        values = as_real(values)
        return self._issue(
            "mean", values.nbytes, partial(self._all_reduce_mean, self.group, values)
        )

    def all_to_all(self, output: Tensor, source: Tensor) -> Pending:
        """See ``Collectives.all_to_all``; sends bytes, since gloo does not carry every dtype."""
        parts = output.view(torch.uint8), source.view(torch.uint8)
        start = partial(self._all_to_all, self.group, *parts)
        return self._issue("exchange", source.nbytes, start)

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """See ``Collectives.broadcast``; sends bytes, since gloo does not carry every dtype."""
        sent = values.view(-1).view(torch.uint8)
        start = partial(_collectives.broadcast, self.group, sent, source)
        return self._issue("broadcast", sent.nbytes, start)

    def _issue(self, kind: str, nbytes: int, start: Callable[[], Pending]) -> Pending:
        return self._ledger.issue(kind, self._label.text, nbytes, start, self._mark)

    def _all_gather(
        self, group: dist.ProcessGroup, outputs: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Pending:
        return self._ways(group).gathers.all_gather(group, outputs, sources, self._label.text)

    def _reduce_scatter_mean(
        self, group: dist.ProcessGroup, output: Tensor, source: Tensor
    ) -> Pending:
        way = self._ways(group).reduces
        return way.reduce_scatter_mean(group, output, source, self._label.text)

    def _all_reduce_mean(self, group: dist.ProcessGroup, values: Tensor) -> Pending:
        return self._ways(group).reduces.all_reduce_mean(group, values, self._label.text)

    def _all_to_all(self, group: dist.ProcessGroup, output: Tensor, source: Tensor) -> Pending:
        return self._ways(group).exchanges.all_to_all(group, output, source, self._label.text)

    def _meet(self, group: dist.ProcessGroup) -> Pending:
        self._ways(group)
        return Done()

    def _ways(self, group: dist.ProcessGroup) -> _Ways:
        found = _ways.get(group)
        if found is not None and found.era is self._ledger.era:
            ways = found.ways.get(self._choice)
            if ways is not None:
                return ways
        return ways_of(group, self._choice)


def ledger_for(group: dist.ProcessGroup, device_type: str) -> Ledger:
    """Return the ledger of ``group``, able to end its collectives of the CPU and of a device."""
    ledger, reference = ledger_of(group), weakref.ref(group)
    if _collectives.is_on_gloo(group):
        ledger.breaks = partial(_break_off, reference)
    if device_type != "cpu" and _collectives.has_peers(group, device_type):
        ledger.aborts = partial(_abort, reference, device_type)
    return ledger


def issued(
    group: dist.ProcessGroup,
    device_type: str,
    kind: str,
    start: Callable[[], Pending],
    *,
    label: str = "",
    nbytes: int = 0,
) -> Pending:
    """Start a collective of tensors on such a device, in sight of those who watch.

    The arguments are those of ``Ledger.issue``; 0 bytes if ranks send differently many, as their
    ledgers must be alike.
    """
    mark = None if device_type == "cpu" else partial(_device.mark, device_type)
    return ledger_for(group, device_type).issue(kind, label, nbytes, start, mark)


def transferred(group: dist.ProcessGroup, label: str, call: Callable[[], Result]) -> Result:
    """Return the result of ``call``, a collective of ``group`` that has ended when it returns.

    Args:
        group: the process group.
        label: what travels, for messages.
        call: uses functions of ``torch.distributed``.

    Raises:
        PeerError: another rank failed, so it cannot end.
    """
    if not isinstance(group, dist.ProcessGroup):
        return call()
    kinds = [*_collectives.device_types(group)]
    ledger = ledger_for(group, "cpu" if "cpu" in kinds else kinds[0])
    running = _Call(call)
    ledger.issue(TRANSFER, label, 0, lambda: running).wait()
    ledger.era.check()  # what an aborted collective leaves behind is no result
    return running.result


class _Call(Generic[Result]):
    """A collective that runs when somebody waits for it."""

    result: Result

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call = call

    def wait(self) -> None:
        """See ``Pending``."""
        self.result = self._call()


def _break_off(reference: weakref.ref[dist.ProcessGroup], waiting: Entry | None) -> None:
    """End what gloo carries for a group in an era that a fault has ended.

    Gloo groups of our own end in any case, as the next era has others. The process group itself is
    of no use afterwards, so it ends only if this rank waits for it.
    """
    group, kind = reference(), "" if waiting is None else waiting[1]
    if group is None:
        return
    found = _ways.get(group)
    ways = [*found.ways.values()] if found is not None and found.era.error is not None else []
    _break_off_own(ways)
    if kind in ("broadcast", "sum", TRANSFER):
        breaks = True
    else:
        used = [one.exchanges if kind == "exchange" else one.gathers for one in ways]
        breaks = kind != "" and any(isinstance(o, Native) and o.carrier is None for o in used)
    if breaks:
        _collectives.break_off(group)


def _break_off_own(ways: Iterable[_Ways]) -> None:
    for one in ways:
        if isinstance(one.gathers, TwoLevels):
            one.gathers.break_off()


def drop_transports() -> None:
    """Break off all gloo groups of our own, and drop all transports of this process."""
    for found in [*_ways.values()]:
        _break_off_own(found.ways.values())
    _ways.clear()


def _abort(reference: weakref.ref[dist.ProcessGroup], device_type: str) -> None:
    """Begin to end the collectives of devices of a group: that may take a while."""
    group = reference()
    if group is not None:
        _collectives.begin_abort(group, device_type)


def default_choice(group: dist.ProcessGroup, device_type: str) -> TransportRequest:
    """Return what is asked of ``group`` unless somebody asks for something else."""
    gloo_on_cpu = device_type == "cpu" and _collectives.backend_name(group, device_type) == "gloo"
    transport = Transport.SHARED if gloo_on_cpu else Transport.NATIVE
    return TransportRequest(transport, device_type, _collectives.has_average(group, device_type))
