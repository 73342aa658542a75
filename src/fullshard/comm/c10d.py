"""Collectives over ``torch.distributed``: NCCL and its like natively, gloo by sends in pairs."""

from __future__ import annotations

import copy
import enum
import weakref
from collections.abc import Sequence
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch
from fullshard.comm.protocol import Pending, Together
from fullshard.errors import ProtocolError

__all__ = ["C10d", "Transport"]


class Transport(enum.Enum):
    """How bytes travel."""

    NATIVE = "native"
    """The backend's own collectives."""
    PAIRS = "pairs"
    """One send and one receive for each other rank, and local sums: for gloo on CPU.

    By themselves reductions took 0.2 to 0.9 of the time of gloo's own, and gathers half of it at
    28 MB and about as long below (``python -m bench transport``, 2 and 4 ranks). In a training
    step of many small units the posting of receives waits for gloo's thread, which an all-to-all,
    posted at once, does not; so what is smaller than ``_SMALL_NBYTES`` travels by that.
    """


_SMALL_NBYTES = 1 << 20

# Tags tell our sends apart from the user's, and the gathers and reductions in flight from each
# other: every rank of a group counts the same collectives, so equal tags meet.
_FIRST_TAG = 1 << 20
_TAGS = 1 << 29


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
        self._tags = count()

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
        return self._transport is Transport.PAIRS

    def by_sums(self) -> C10d:
        """See ``Collectives.by_sums``; it counts the same tags."""
        new = copy.copy(self)
        new._averages = False
        return new

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """See ``Collectives.all_gather``."""
        if self._transport is Transport.NATIVE:
            return _torch.all_gather(self.group, outputs, sources)
        works: list[dist.Work] = []
        for output, source in zip(outputs, sources, strict=True):
            if output.nbytes < _SMALL_NBYTES:
                works.append(_torch.all_to_all(self.group, output, source.repeat(self.world)))
            else:
                slices = output.view(self.world, -1).unbind()
                works += self._exchange([source] * self.world, slices)
                _put(source, slices[self.rank])
        return Together(works)

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """See ``Collectives.reduce_scatter_mean``."""
        if self._transport is Transport.NATIVE:
            return _NativeMean(self.group, output, source, self._averages)
        if source.nbytes < _SMALL_NBYTES:
            exchanged = torch.empty_like(source)
            work = _torch.all_to_all(self.group, exchanged, source)
            own, *others = exchanged.view(self.world, -1).unbind()
            return _LocalMean([work], output, own, others)
        slices = source.view(self.world, -1)
        received = torch.empty_like(slices[1:])
        free = iter(received)
        targets = [slices[r] if r == self.rank else next(free) for r in range(self.world)]
        works = self._exchange(slices.unbind(), targets)
        return _LocalMean(works, output, slices[self.rank], received.unbind())

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """See ``Collectives.all_reduce_mean``; gloo's own is the same on all ranks as well."""
        op = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        work = _torch.all_reduce(self.group, values, op)
        return work if self._averages else _Divided(work, values, self.world)

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """See ``Collectives.broadcast``; as bytes, since gloo does not carry every dtype."""
        return _torch.broadcast(self.group, values.view(-1).view(torch.uint8), source)

    def _exchange(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> list[dist.Work]:
        """Send ``sources[r]`` to each other rank r while ``targets[r]`` is received from it."""
        tag = _FIRST_TAG + next(self._tags) % _TAGS
        works = []
        for distance in range(1, self.world):
            peer = (self.rank - distance) % self.world
            works.append(self.group.recv([targets[peer]], peer, tag))
        for distance in range(1, self.world):
            peer = (self.rank + distance) % self.world
            works.append(self.group.send([sources[peer]], peer, tag))
        return works


def _put(source: Tensor, place: Tensor) -> None:
    """Copy ``source`` to its place, unless it is there."""
    if source.data_ptr() != place.data_ptr():
        place.copy_(source)


def _default_transport(group: dist.ProcessGroup, device_type: str) -> Transport:
    gloo_on_cpu = device_type == "cpu" and _torch.backend_name(group, device_type) == "gloo"
    return Transport.PAIRS if gloo_on_cpu else Transport.NATIVE


class _Divided:
    """A sum on its way, to be made a mean."""

    def __init__(self, work: dist.Work, values: Tensor, world: int) -> None:
        self._work = work
        self._values = values
        self._world = world

    def wait(self) -> None:
        self._work.wait()
        self._values.div_(self._world)


class _LocalMean(Together):
    """Other ranks' slices on their way, then their mean with our own."""

    def __init__(
        self, works: list[dist.Work], output: Tensor, own: Tensor, received: Sequence[Tensor]
    ) -> None:
        super().__init__(works)
        self._output = output
        self._own = own
        self._received = received

    def wait(self) -> None:
        super().wait()
        wide = torch.promote_types(self._own.dtype, torch.float32)
        in_place = self._output.dtype == wide  # else add up in wide numbers, round once
        total = self._output if in_place else torch.empty_like(self._own, dtype=wide)
        if self._own.dtype == wide:
            torch.add(self._own, self._received[0], out=total)
        else:
            total.copy_(self._own).add_(self._received[0])
        for part in self._received[1:]:
            total.add_(part)
        total.div_(1 + len(self._received))
        if not in_place:
            self._output.copy_(total)


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
