"""Collectives over ``torch.distributed``: NCCL and its like natively, gloo in ways of our own."""

from __future__ import annotations

import copy
import enum
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch
from fullshard.comm.means import Divided
from fullshard.comm.pairs import Pairs
from fullshard.comm.protocol import Pending
from fullshard.comm.shared import Shared
from fullshard.errors import ProtocolError

__all__ = ["C10d", "Transport"]


class Transport(enum.Enum):
    """How the bytes of gathers and means travel; broadcasts are the backend's."""

    NATIVE = "native"
    """By the backend's own collectives."""
    PAIRS = "pairs"
    """By sends in pairs and local sums, see ``Pairs``: for gloo between hosts."""
    SHARED = "shared"
    """Through shared memory, see ``Shared``, if all ranks are on one host; else in pairs."""


class _Way(Protocol):
    """What gathers and reduces in place of a backend; one object for each group."""

    def all_gather(
        self, group: dist.ProcessGroup, outputs: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Pending: ...

    def reduce_scatter_mean(
        self, group: dist.ProcessGroup, output: Tensor, source: Tensor
    ) -> Pending: ...

    def all_reduce_mean(self, group: dist.ProcessGroup, values: Tensor) -> Pending: ...


_ways: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Transport, _Way]]
_ways = weakref.WeakKeyDictionary()


def _way(group: dist.ProcessGroup, transport: Transport) -> _Way:
    """The first call for a group and ``SHARED`` meets its other ranks."""
    ways = _ways.setdefault(group, {})
    if transport not in ways:
        shared = Shared.within(group) if transport is Transport.SHARED else None
        ways[transport] = shared or Pairs()
    return ways[transport]


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
        self._transport = transport or _default_transport(group, device_type)
        self._averages = _torch.has_average(group, device_type)

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
        """Our own sums are wide; those of a backend are made in the dtype that travels."""
        return self._transport is not Transport.NATIVE

    def by_sums(self) -> C10d:
        """See ``Collectives.by_sums``."""
        new = copy.copy(self)
        new._averages = False
        return new

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """See ``Collectives.all_gather``."""
        if self._transport is Transport.NATIVE:
            return _torch.all_gather(self.group, outputs, sources)
        return _way(self.group, self._transport).all_gather(self.group, outputs, sources)

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """See ``Collectives.reduce_scatter_mean``."""
        if self._transport is Transport.NATIVE:
            return _NativeMean(self.group, output, source, self._averages)
        return _way(self.group, self._transport).reduce_scatter_mean(self.group, output, source)

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """See ``Collectives.all_reduce_mean``."""
        if self._transport is not Transport.NATIVE:
            return _way(self.group, self._transport).all_reduce_mean(self.group, values)
        op = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        work = _torch.all_reduce(self.group, values, op)
        return work if self._averages else Divided(work, values, self.world)

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """See ``Collectives.broadcast``; as bytes, since gloo does not carry every dtype."""
        return _torch.broadcast(self.group, values.view(-1).view(torch.uint8), source)


def _default_transport(group: dist.ProcessGroup, device_type: str) -> Transport:
    gloo_on_cpu = device_type == "cpu" and _torch.backend_name(group, device_type) == "gloo"
    return Transport.SHARED if gloo_on_cpu else Transport.NATIVE


class _NativeMean:
    """The backend's reduce-scatter; gloo has no mean of fp64: there a sum and a division."""

    def __init__(
        self, group: dist.ProcessGroup, output: Tensor, source: Tensor, averages: bool
    ) -> None:
        self._average = averages
        self._output = output
        self._world = group.size()
        self._result = output if output.dtype == source.dtype else source.new_empty(output.shape)
        op = dist.ReduceOp.AVG if self._average else dist.ReduceOp.SUM
        self._work = _torch.reduce_scatter(group, self._result, source, op)
        self._source = source

    def wait(self) -> None:
        self._work.wait()
        if not self._average:
            self._result.div_(self._world)
        if self._result is not self._output:
            self._output.copy_(self._result)
