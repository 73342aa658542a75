"""Collectives over ``torch.distributed``: NCCL and its like natively, gloo in ways of our own."""

from __future__ import annotations

import copy
import enum
import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch
from fullshard.comm.meeting import meet
from fullshard.comm.native import Native
from fullshard.comm.pairs import Pairs
from fullshard.comm.protocol import Label, Pending, as_real
from fullshard.comm.shared import Shared
from fullshard.errors import ProtocolError


class Transport(enum.Enum):
    """How the bytes of gathers and means travel; broadcasts are the backend's."""

    NATIVE = "native"
    """By the backend's own collectives."""
    PAIRS = "pairs"
    """By sends in pairs and local sums, see ``Pairs``: for gloo between hosts."""
    SHARED = "shared"
    """Through shared memory, see ``Shared``, if all ranks are on one host; else as suits hosts."""


class _Way(Protocol):
    """What gathers or reduces in the end; one object for each group."""

    @property
    def adds_wide(self) -> bool: ...

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
    """What a group gathers and what it reduces by; the same on all its ranks."""

    gathers: _Way
    reduces: _Way


_Choice = tuple[Transport, str, bool]
_ways: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Choice, _Ways]]
_ways = weakref.WeakKeyDictionary()


def ways_of(
    group: dist.ProcessGroup,
    transport: Transport,
    *,
    device_type: str = "cpu",
    averages: bool = False,
) -> _Ways:
    """The first call for a group and ``SHARED`` meets its other ranks."""
    ways = _ways.setdefault(group, {})
    choice = (transport, device_type, averages)
    if choice not in ways:
        native = Native(device_type, averages=averages)
        if transport is Transport.NATIVE:
            ways[choice] = _Ways(native, native)
        elif transport is Transport.PAIRS:
            pairs = Pairs()
            ways[choice] = _Ways(pairs, pairs)
        else:
            ways[choice] = _met(group, native)
    return ways[choice]


def _met(group: dist.ProcessGroup, native: Native) -> _Ways:
    """By memory if all ranks can, else by what is less for the network between their hosts."""
    meeting = meet(group)
    if meeting.memory is not None:
        shared = Shared(group.rank(), meeting.memory, meeting.neighbours)
        return _Ways(shared, shared)
    pairs = Pairs()
    loads = Loads.of(meeting.hosts)
    return _Ways(
        native if loads.ring_gather < loads.pairs else pairs,
        native if loads.ring_reduction < loads.pairs else pairs,
    )


class Loads(NamedTuple):
    """How many shards enter the host that most enter, by what carries them.

    Pairs cross the network once for each rank of a host: every shard of another host comes to each
    of them by itself. Gloo's own all-gather passes all shards but one around a ring, once by each
    link; its own reduce-scatter is an all-reduce, twice that. The network between hosts is what
    takes the time where a host has more than one rank: at 200 Mbit/s, 8 MB of fp32, gloo's own
    took of the time of pairs 0.76 (gather) and 1.38 (reduction) on 2 hosts of 2 ranks, 0.46 and
    0.89 on 2 of 4, and the bytes that came in were those counted here.
    """

    pairs: int
    ring_gather: int
    ring_reduction: int

    @classmethod
    def of(cls, hosts: Sequence[bytes]) -> Loads:
        """For ranks on these hosts."""
        world = len(hosts)
        pairs = max(hosts.count(host) * (world - hosts.count(host)) for host in hosts)
        links = [hosts[rank] for rank in range(world) if hosts[rank] != hosts[rank - 1]]
        ring = max((links.count(host) for host in links), default=0) * (world - 1)
        return cls(pairs, ring, 2 * ring)


class C10d:
    """Collectives of one process group of two ranks or more, which is not kept alive.

    Whoever destroys a group wants its threads and connections gone, whatever still knows us.
    """

    def __init__(
        self, group: dist.ProcessGroup, device_type: str, transport: Transport | None = None
    ) -> None:
        self._reference = weakref.ref(group)
        self.rank = group.rank()
        self.world = group.size()
        self._device_type = device_type
        self._transport = transport or _default_transport(group, device_type)
        self._averages = _torch.has_average(group, device_type)
        self._label = Label()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            ProtocolError: it was destroyed.
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
        """Our own sums are wide; those of a backend are made in the dtype that travels.

        Which of them is ours is known once the ranks have met, so all of them must ask this.
        """
        return self._ways(self.group).reduces.adds_wide

    def by_sums(self) -> C10d:
        """See ``Collectives.by_sums``."""
        new = copy.copy(self)
        new._averages = False
        return new

    def labelled(self, label: Label) -> C10d:
        """See ``Collectives.labelled``."""
        new = copy.copy(self)
        new._label = label
        return new

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """See ``Collectives.all_gather``."""
        group = self.group
        if outputs[0].is_complex():
            outputs, sources = list(map(as_real, outputs)), list(map(as_real, sources))
        return self._ways(group).gathers.all_gather(group, outputs, sources, self._label.text)

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """See ``Collectives.reduce_scatter_mean``."""
        group = self.group
        way = self._ways(group).reduces
        output, source = as_real(output), as_real(source)
        return way.reduce_scatter_mean(group, output, source, self._label.text)

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """See ``Collectives.all_reduce_mean``."""
        group = self.group
        way = self._ways(group).reduces
        return way.all_reduce_mean(group, as_real(values), self._label.text)

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """See ``Collectives.broadcast``; as bytes, since gloo does not carry every dtype."""
        return _torch.broadcast(self.group, values.view(-1).view(torch.uint8), source)

    def _ways(self, group: dist.ProcessGroup) -> _Ways:
        return ways_of(
            group, self._transport, device_type=self._device_type, averages=self._averages
        )


def _default_transport(group: dist.ProcessGroup, device_type: str) -> Transport:
    gloo_on_cpu = device_type == "cpu" and _torch.backend_name(group, device_type) == "gloo"
    return Transport.SHARED if gloo_on_cpu else Transport.NATIVE
