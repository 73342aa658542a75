"""Gathers and means over a process group by one send and one receive for each other rank."""

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
# other: every rank of a group counts the same collectives, so equal tags meet.
_FIRST_TAG = 1 << 20
_TAGS = 1 << 29


class Pairs:
    """For gloo between hosts: its own collectives take longer.

    By themselves reductions took 0.2 to 0.9 of the time of gloo's own, and gathers half of it at
    28 MB and about as long below (``python -m bench transport``, 2 and 4 ranks). In a training
    step of many small units the posting of receives waits for gloo's thread, which an all-to-all,
    posted at once, does not; so what is smaller than ``_SMALL_NBYTES`` travels by that.
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
        """See ``Collectives.all_reduce_mean``; gloo's own has the same bits on all ranks."""
        self._compared.compare(group, label)
        work = _torch.all_reduce(group, values, dist.ReduceOp.SUM) or Done()
        return Divided(work, values, group.size())

    def _exchange(
        self, group: dist.ProcessGroup, sources: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> list[dist.Work]:
        """Send ``sources[r]`` to each other rank r while ``targets[r]`` is received from it."""
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
        put_mean(self._output, self._own, self._received)
