"""Collectives by the public functions of ``torch.distributed``, one call for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._torch import collectives as _collectives
from fullshard.comm.c10d import C10d, Transport
from fullshard.comm.means import begun
from fullshard.comm.protocol import Done, Pending, WorkGroup

_AVERAGED = (torch.float32, torch.bfloat16)
"""Dtypes that every backend can average and whose sums do not overflow."""


class Public(C10d):
    """The backend's collectives, called as in PyTorch's FSDP2, for users who count or replace them.

    The functions are looked up in ``torch.distributed`` at each call.
    """

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        super().__init__(group, device_type, Transport.NATIVE)
        self._choice = self._choice._replace(averages=True)
        self._is_async = device_type == "cpu"  # a device runs them in order on the current stream

    def _issue(self, kind: str, nbytes: int, start: Callable[[], Pending]) -> Pending:
        self._ways(self.group)  # else a fault would not know that these waits are the backend's own
        return super()._issue(kind, nbytes, start)

    def _all_gather(
        self, group: dist.ProcessGroup, outputs: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Pending:
        gather, _ = _collectives.public_collectives()
        works = [
            gather(output, source, group=group, async_op=self._is_async)
            for output, source in zip(outputs, sources, strict=True)
        ]
        return WorkGroup([work for work in works if work is not None])

    def _reduce_scatter_mean(
        self, group: dist.ProcessGroup, output: Tensor, source: Tensor
    ) -> Pending:
        op, after = self._begun(source)
        same = output.dtype == source.dtype
        result = output if same else source.new_empty(output.shape)
        _, reduce = _collectives.public_collectives()
        work = reduce(output=result, input=source, op=op, group=group, async_op=self._is_async)
        return _Scaled(work, result, after, output)

    def _all_reduce_mean(self, group: dist.ProcessGroup, values: Tensor) -> Pending:
        op, after = self._begun(values)
        work = dist.all_reduce(values, op, group=group, async_op=self._is_async)
        return _Scaled(work, values, after, values)

    def _all_to_all(self, group: dist.ProcessGroup, output: Tensor, source: Tensor) -> Pending:
        exchange = dist.all_to_all_single
        return exchange(output, source, group=group, async_op=self._is_async) or Done()

    def _begun(self, values: Tensor) -> tuple[dist.ReduceOp.RedOpType, float]:
        averages = self._choice.averages and values.dtype in _AVERAGED
        return begun(values, self.world, averages=averages)


class _Scaled:
    """A pending result that ``wait`` divides and copies to its output."""

    def __init__(
        self, work: dist.Work | None, result: Tensor, divisor: float, output: Tensor
    ) -> None:
        self._work = work
        self._result = result
        self._divisor = divisor
        self._output = output

    def wait(self) -> None:
        if self._work is not None:  # None if the function, perhaps a user's, has waited already
            self._work.wait()
        if self._divisor != 1:
            self._result.div_(self._divisor)
        if self._result is not self._output:
            self._output.copy_(self._result)
