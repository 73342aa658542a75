"""User-defined collectives that replace the backend's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.comm.protocol import Pending, Then, Wrapper


class Comm(ABC):
    """A user-defined collective with PyTorch's interface, so objects written for PyTorch work."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory to send from or receive into.

        An implementation may return the same memory again once the previous collective has ended.
        A reduction holds two tensors at a time: its input and its output.
        """


class AllGather(Comm):
    """A user-defined all-gather of 1-D tensors of equal size."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather; return None if the result is complete on the current stream."""


class ReduceScatter(Comm):
    """A user-defined reduce-scatter of a 1-D tensor."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce with ``op``; return None if the result is complete on the current stream."""


@dataclass(frozen=True)
class Custom(Wrapper):
    """The collectives of ``inner``, with the gather, the reduction or both replaced by the user's.

    The user's objects allocate gather outputs and reduction inputs and outputs, so all are copied.
    """

    gather: AllGather | None = None
    reduce: ReduceScatter | None = None

    @property
    def adds_wide(self) -> bool:
        """False for a user-defined reduction, which receives gradients in the reduce dtype."""
        return self.reduce is None and self.inner.adds_wide

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """See ``Collectives.all_gather``."""
        group = self.group
        if self.gather is None or group is None:
            return super().all_gather(outputs, sources)
        sent = sources[0] if len(sources) == 1 else torch.cat([*sources])
        size = (sent.numel() * self.world,)
        flat = self.gather.allocate(size, dtype=sent.dtype, device=sent.device)
        work = self.gather(flat, sent, group, async_op=_is_async(sent))
        return Then(work, partial(_spread, outputs, flat, self.world), sent)

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """See ``Collectives.reduce_scatter_mean``."""
        group = self.group
        if self.reduce is None or group is None:
            return super().reduce_scatter_mean(output, source)
        allocate = partial(self.reduce.allocate, dtype=source.dtype, device=source.device)
        sent = allocate((source.numel(),)).copy_(source)
        received = allocate((source.numel() // self.world,))
        work = self.reduce(received, sent, group, dist.ReduceOp.SUM, async_op=_is_async(source))
        return Then(work, partial(_put_divided, received, output, self.world), sent)


def _is_async(values: Tensor) -> bool:
    """Return whether to run asynchronously: only on a CPU, devices use a side stream already."""
    return values.device.type == "cpu"


def _spread(outputs: Sequence[Tensor], flat: Tensor, world: int) -> None:
    """Copy each part of the rows of ``flat`` to its output."""
    parts = flat.view(world, -1).split([output.numel() // world for output in outputs], dim=1)
    for output, part in zip(outputs, parts, strict=True):
        output.view(world, -1).copy_(part)


def _put_divided(received: Tensor, output: Tensor, world: int) -> None:
    """Divide in the wider dtype, so that the result is rounded once."""
    if received.itemsize >= output.itemsize:
        output.copy_(received.div_(world))
    else:
        output.copy_(received).div_(world)
