"""Collectives over ``torch.distributed``: native for NCCL and similar, custom paths for gloo."""

from __future__ import annotations

import copy
import enum
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._torch import collectives as _collectives
from fullshard._torch import device as _device
from fullshard.comm import public
from fullshard.comm.columns import OwnGroups
from fullshard.comm.heartbeat import clamped
from fullshard.comm.ledger import RENDEZVOUS, TRANSFER, Entry, Era, Ledger, Mark, ledger_of
from fullshard.comm.local_peer import LocalPeer, LocalPeers
from fullshard.comm.native import Native
from fullshard.comm.protocol import Label, Pending, Then, as_real
from fullshard.comm.rendezvous import meet
from fullshard.comm.shared import Shared
from fullshard.comm.twolevel import TwoLevels
from fullshard.errors import ProtocolError

Result = TypeVar("Result")


class Transport(enum.Enum):
    """The transport of gathers, means and exchanges; broadcasts always use the backend."""

    NATIVE = "native"
    """The backend's own collectives."""
    PUBLIC = "public"
    """The same, through the functions of ``torch.distributed``."""
    SHARED = "shared"
    """Shared memory within a host (``Shared``), and gloo groups of our own among hosts
    (``TwoLevels``). If hosts have different numbers of ranks, each rank counts as a host. All ranks
    use the backend's own collectives if any rank asks for them or cannot create shared memory. Sums
    are in fp32 or wider in any case."""


class TransportRequest(NamedTuple):
    """A request for the ways of a group."""

    transport: Transport
    device_type: str = "cpu"
    averages: bool = False
    """True if a mean may be the backend's own; else it is made of a sum."""


Way = Native | Shared | TwoLevels
"""An implementation of gathers, reductions and exchanges; each object serves one process group."""


class _OfEra(NamedTuple):
    era: Era
    ways: dict[TransportRequest, Way]
    numbers: Iterator[int]
    """Numbers of the rendezvous of this group in this era."""


_ways = weakref.WeakKeyDictionary[dist.ProcessGroup, _OfEra]()


def way_of(group: dist.ProcessGroup, choice: TransportRequest) -> Way:
    """Return the way of ``group``; with SHARED, the first call of an era is a collective."""
    found, era = _ways.get(group), ledger_of(group).era
    if found is None or found.era is not era:
        found = _ways[group] = _OfEra(era, {}, itertools.count())
    way = found.ways.get(choice)
    if way is None:
        way = found.ways[choice] = _new_way(group, found, choice)
    return way


def _new_way(group: dist.ProcessGroup, of_era: _OfEra, choice: TransportRequest) -> Way:
    is_shared = choice.transport is Transport.SHARED
    calls = public if choice.transport is Transport.PUBLIC else _collectives
    native = Native(choice.device_type, averages=choice.averages, adds_wide=is_shared, calls=calls)
    return _met(group, of_era, native) if is_shared else native


def _met(group: dist.ProcessGroup, of_era: _OfEra, native: Native) -> Way:
    """Return the way of ranks that have met; ``native`` if ``meet`` returns None."""
    with ledger_of(group).starting(RENDEZVOUS):
        met = meet(group, f"{of_era.era.name}/{next(of_era.numbers)}", of_era.era)
        if met is None:
            return native
        rank, timeout = group.rank(), _collectives.timeout_of(group, "cpu")
        timeout_s = clamped(timeout.total_seconds())
        if len(met.hosts) > 1:
            own = OwnGroups.of(met.name, met.hosts, rank, timeout)
    peers = [LocalPeer(r, *one, timeout_s) for r, one in met.peers.items()]
    shared = Shared(rank, met.memory, LocalPeers(peers, of_era.era))
    return shared if len(met.hosts) == 1 else TwoLevels(met.hosts, rank, shared, own)


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
        label = self._label.text
        return self._carry(
            "gather", nbytes, lambda way, group: way.all_gather(group, outputs, sources, label)
        )

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """See ``Collectives.reduce_scatter_mean``."""
        output, source, label = as_real(output), as_real(source), self._label.text
        return self._carry(
            "reduction",
            source.nbytes,
            lambda way, group: way.reduce_scatter_mean(group, output, source, label),
        )

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """See ``Collectives.all_reduce_mean``."""
        values, label = as_real(values), self._label.text
        return self._carry(
            "mean", values.nbytes, lambda way, group: way.all_reduce_mean(group, values, label)
        )

    def all_to_all(self, output: Tensor, source: Tensor) -> Pending:
        """See ``Collectives.all_to_all``; sends bytes, since gloo does not carry every dtype."""
        into, sent, label = output.view(torch.uint8), source.view(torch.uint8), self._label.text
        return self._carry(
            "exchange", source.nbytes, lambda way, group: way.all_to_all(group, into, sent, label)
        )

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """See ``Collectives.broadcast``; sends bytes, since gloo does not carry every dtype."""
        sent = values.view(-1).view(torch.uint8)
        start = partial(_collectives.broadcast, self.group, sent, source)
        return self._ledger.issue("broadcast", self._label.text, sent.nbytes, start, self._mark)

    def _carry(
        self, kind: str, nbytes: int, call: Callable[[Way, dist.ProcessGroup], Pending]
    ) -> Pending:
        """Start a collective by ``call``, which gets the way of the group, and the group."""
        group = self.group
        return self._ledger.issue(
            kind, self._label.text, nbytes, lambda: call(self._way(group), group), self._mark
        )

    def _way(self, group: dist.ProcessGroup) -> Way:
        found = _ways.get(group)
        if found is not None and found.era is self._ledger.era:
            way = found.ways.get(self._choice)
            if way is not None:
                return way
        return way_of(group, self._choice)


class Public(C10d):
    """The backend's collectives, called as in PyTorch's FSDP2, for users who count or replace them.

    The functions are looked up in ``torch.distributed`` at each call.
    """

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        super().__init__(group, device_type, Transport.PUBLIC)
        self._choice = self._choice._replace(averages=True)


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
    results: list[Result] = []
    ledger.issue(TRANSFER, label, 0, lambda: Then(None, lambda: results.append(call()))).wait()
    ledger.era.check()  # what an aborted collective leaves behind is no result
    return results[0]


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
    is_native = kind != "" and any(isinstance(one, Native) for one in ways)
    if is_native or kind in ("broadcast", "sum", TRANSFER):
        _collectives.break_off(group)


def _break_off_own(ways: Iterable[Way]) -> None:
    for one in ways:
        if isinstance(one, TwoLevels):
            one.break_off()


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
