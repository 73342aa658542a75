"""User-defined collectives that replace the backend's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.comm.protocol import Around, Pending, Together


class Comm(ABC):
    """A user-defined collective with PyTorch's interface, so objects written for PyTorch work."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory to send from or receive into; every call may return the same memory."""


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
class Custom(Around):
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
        gathers = []
        for output, source in zip(outputs, sources, strict=True):
            flat = _allocated(self.gather, output)
            work = self.gather(flat, source, group, async_op=_is_async(source))
            gathers.append(_Gathered(work, output, flat))
        return Together(gathers)

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """See ``Collectives.reduce_scatter_mean``."""
        group = self.group
        if self.reduce is None or group is None:
            return super().reduce_scatter_mean(output, source)
        sent = _allocated(self.reduce, source).copy_(source)
        size = (source.numel() // self.world,)
        received = self.reduce.allocate(size, dtype=source.dtype, device=source.device)
        work = self.reduce(received, sent, group, dist.ReduceOp.SUM, async_op=_is_async(source))
        return _Reduced(work, output, received, sent, self.world)


def _is_async(values: Tensor) -> bool:
    """Return whether to run asynchronously: only on a CPU, devices use a side stream already."""
    return values.device.type == "cpu"


def _allocated(comm: Comm, like: Tensor) -> Tensor:
    return comm.allocate((like.numel(),), dtype=like.dtype, device=like.device)


@dataclass(frozen=True)
class _Gathered:
    work: dist.Work | None
    output: Tensor
    flat: Tensor

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.output.copy_(self.flat)


@dataclass(frozen=True)
class _Reduced:
    work: dist.Work | None
    output: Tensor
    received: Tensor
    sent: Tensor  # kept alive until the transfer is over
    world: int

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.output.copy_(self.received).div_(self.world)
