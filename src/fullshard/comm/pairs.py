"""Gathers and means by one send to, and one receive from, each other rank of a process group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch
from fullshard.comm.labels import Compared
from fullshard.comm.means import Divided, put_mean
from fullshard.comm.protocol import Done, Pending, Together, put

_SMALL_NBYTES = 1 << 20

# Tags tell our sends apart from the user's, and the gathers and reductions in flight from each
# other: all ranks of a group count the same collectives, so the tags of one exchange are equal.
_FIRST_TAG = 1 << 20
_TAGS = 1 << 29


class Pairs:
    """Sends and receives in pairs for gloo between hosts, where gloo's own collectives are slower.

    Measured alone, reductions took 0.2 to 0.9 of the time of gloo's own; gathers took half of it
    at 28 MB and about the same time below (``python -m bench transport``, 2 and 4 ranks). In a
    training step of many small units, posting receives waits for gloo's thread; an all-to-all is
    posted at once and does not. So tensors below ``_SMALL_NBYTES`` travel by all-to-all.
    """

    adds_wide = True

    def __init__(self) -> None:
        self._tags = count()
        self._compared = Compared("cpu")

    def all_gather(
        self,
        group: dist.ProcessGroup,
        outputs: Sequence[Tensor],
        sources: Sequence[Tensor],
        label: str,
    ) -> Pending:
        """See ``Collectives.all_gather``."""
        self._compared.compare(group, label)
        rank, world = group.rank(), group.size()
        works: list[dist.Work] = []
        for output, source in zip(outputs, sources, strict=True):
            if output.nbytes < _SMALL_NBYTES:
                works.append(_torch.all_to_all(group, output, source.repeat(world)))
            else:
                slices = output.view(world, -1).unbind()
                works += self._exchange(group, [source] * world, slices)
                put(source, slices[rank])
        return Together(works)

    def reduce_scatter_mean(
        self, group: dist.ProcessGroup, output: Tensor, source: Tensor, label: str
    ) -> Pending:
        """See ``Collectives.reduce_scatter_mean``."""
        self._compared.compare(group, label)
        rank, world = group.rank(), group.size()
        if source.nbytes < _SMALL_NBYTES:
            exchanged = torch.empty_like(source)
            work = _torch.all_to_all(group, exchanged, source)
            own, *others = exchanged.view(world, -1).unbind()
            return _Mean([work], output, own, others)
        slices = source.view(world, -1)
        received = torch.empty_like(slices[1:])
        free = iter(received)
        targets = [slices[r] if r == rank else next(free) for r in range(world)]
        works = self._exchange(group, slices.unbind(), targets)
        return _Mean(works, output, slices[rank], received.unbind())

    def all_reduce_mean(self, group: dist.ProcessGroup, values: Tensor, label: str) -> Pending:
        """See ``Collectives.all_reduce_mean``; gloo's own gives the same bits on all ranks."""
        self._compared.compare(group, label)
        work = _torch.all_reduce(group, values, dist.ReduceOp.SUM) or Done()
        return Divided(work, values, group.size())

    def _exchange(
        self, group: dist.ProcessGroup, sources: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> list[dist.Work]:
        """Send ``sources[r]`` to, and receive ``targets[r]`` from, each other rank r."""
        rank, world = group.rank(), group.size()
        tag = _FIRST_TAG + next(self._tags) % _TAGS
        works = []
        for distance in range(1, world):
            peer = (rank - distance) % world
            works.append(group.recv([targets[peer]], peer, tag))
        for distance in range(1, world):
            peer = (rank + distance) % world
            works.append(group.send([sources[peer]], peer, tag))
        return works


class _Mean(Together):
    """Pending slices of the other ranks, which ``wait`` averages with our own slice."""

    def __init__(
        self, works: list[dist.Work], output: Tensor, own: Tensor, received: Sequence[Tensor]
    ) -> None:
        super().__init__(works)
        self._output = output
        self._own = own
        self._received = received

    def wait(self) -> None:
        super().wait()
        put_mean(self._output, self._own, self._received)
