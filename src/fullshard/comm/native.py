"""Gathers and means by a backend's own collectives, such as those of NCCL or gloo."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._torch import collectives as _collectives
from fullshard.comm.labels import Compared
from fullshard.comm.means import begun, put_mean, wide_dtype
from fullshard.comm.protocol import Done, Pending, Splits, Then

_AVERAGED = (torch.float32, torch.bfloat16)
"""Dtypes that every backend can average and whose sums do not overflow."""


class Native:
    """The backend's own collectives of one process group."""

    def __init__(
        self,
        device_type: str,
        *,
        averages: bool,
        adds_wide: bool = False,
        calls: ModuleType = _collectives,
    ) -> None:
        """Make means with the backend's own mean if ``averages``, otherwise from sums.

        With ``adds_wide``, sums of numbers below 32 bits are in fp32; a backend's would be in their
        own dtype. ``reduce_scatter_mean`` sends the numbers as they are and adds them up here;
        ``all_reduce_mean`` casts them first. ``calls`` is the module with the functions to call:
        ``_torch.collectives``, or ``comm.public``, with which labels are not compared.
        """
        self.adds_wide = adds_wide
        self._calls = calls
        self._compares = calls is _collectives
        self._averages = averages
        self._in_order = device_type != "cpu"
        self._compared = Compared(device_type)

    def _begin(self, group: dist.ProcessGroup, label: str) -> None:
        """Compare the label of a collective, if it is new."""
        if self._compares:
            self._compared.compare(group, label)

    def _op(self, values: Tensor, world: int) -> tuple[dist.ReduceOp.RedOpType, float]:
        averages = self._averages and (self._compares or values.dtype in _AVERAGED)
        return begun(values, world, averages=averages)

    def all_gather(
        self,
        group: dist.ProcessGroup,
        outputs: Sequence[Tensor],
        sources: Sequence[Tensor],
        label: str,
    ) -> Pending:
        """See ``Collectives.all_gather``."""
        self._begin(group, label)
        work = self._calls.all_gather(group, outputs, sources, in_order=self._in_order)
        return work or Done()

    def reduce_scatter_mean(
        self, group: dist.ProcessGroup, output: Tensor, source: Tensor, label: str
    ) -> Pending:
        """See ``Collectives.reduce_scatter_mean``."""
        self._begin(group, label)
        if self.adds_wide and source.dtype.itemsize < 4:
            arrived, sent = torch.empty_like(source), source.view(torch.uint8)
            pending = self._calls.all_to_all(group, arrived.view(torch.uint8), sent)
            first, *others = arrived.view(group.size(), -1).unbind()
            return Then(pending, partial(put_mean, output, first, others), source)
        result = output if output.dtype == source.dtype else source.new_empty(output.shape)
        op, divisor = self._op(source, group.size())
        work = self._calls.reduce_scatter(group, result, source, op, in_order=self._in_order)
        return Then(work, partial(_put_divided, result, divisor, output), source)

    def all_reduce_mean(self, group: dist.ProcessGroup, values: Tensor, label: str) -> Pending:
        """See ``Collectives.all_reduce_mean``."""
        self._begin(group, label)
        is_cast = self.adds_wide and values.dtype.itemsize < 4
        result = values.to(wide_dtype(values.dtype)) if is_cast else values
        op, divisor = self._op(result, group.size())
        work = self._calls.all_reduce(group, result, op, in_order=self._in_order)
        return Then(work, partial(_put_divided, result, divisor, values))

    def all_to_all(
        self,
        group: dist.ProcessGroup,
        output: Tensor,
        source: Tensor,
        label: str,
        splits: Splits | None = None,
    ) -> Pending:
        """See ``Collectives.all_to_all``; with ``splits``, slices may differ in size."""
        self._begin(group, label)
        lengths, sizes = splits or ((), ())
        work = self._calls.all_to_all(
            group, output, source, sizes, lengths, in_order=self._in_order
        )
        return Then(work, Done().wait, source)


def _put_divided(result: Tensor, divisor: float, output: Tensor) -> None:
    """Write a sum, divided by ``divisor``, into ``output``, which may be ``result`` itself."""
    if divisor != 1:
        result.div_(divisor)
    if result is not output:
        output.copy_(result)
