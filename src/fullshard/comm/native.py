"""Gathers and means by a backend's own collectives, such as those of NCCL or gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._torch import collectives as _collectives
from fullshard.comm.labels import Compared, losing_ranks
from fullshard.comm.means import ScaledSum, begun, put_mean, wide_dtype
from fullshard.comm.protocol import Done, Pending, Splits


class Native:
    """The backend's own collectives of one process group."""

    def __init__(
        self,
        device_type: str,
        *,
        averages: bool,
        adds_wide: bool = False,
        carrier: dist.ProcessGroup | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Make means with the backend's own mean if ``averages``, otherwise from sums.

        With ``adds_wide``, sums of numbers below 32 bits are in fp32; a backend's would be in their
        own dtype. ``reduce_scatter_mean`` sends the numbers as they are and adds them up here;
        ``all_reduce_mean`` casts them first. ``carrier`` is a gloo group of the same ranks, which
        is used instead of the process group. ``before`` is called before this rank blocks.
        """
        self.adds_wide = adds_wide
        self.carrier = carrier
        self._before = before
        self._averages = averages
        self._in_order = device_type != "cpu"
        self._compared = Compared(device_type)

    def _begin(self, group: dist.ProcessGroup, label: str) -> dist.ProcessGroup:
        """Compare the label of a collective, if it is new; return the group that carries it."""
        if self._before is not None:
            self._before()
        self._compared.compare(group, label, self.carrier)
        return self.carrier or group

    def all_gather(
        self,
        group: dist.ProcessGroup,
        outputs: Sequence[Tensor],
        sources: Sequence[Tensor],
        label: str,
    ) -> Pending:
        """See ``Collectives.all_gather``."""
        group = self._begin(group, label)
        work = _collectives.all_gather(group, outputs, sources, in_order=self._in_order)
        return work or Done()

    def reduce_scatter_mean(
        self, group: dist.ProcessGroup, output: Tensor, source: Tensor, label: str
    ) -> Pending:
        """See ``Collectives.reduce_scatter_mean``."""
        group = self._begin(group, label)
        if self.adds_wide and source.dtype.itemsize < 4:
            arrived, sent = torch.empty_like(source), source.view(torch.uint8)
            pending = _collectives.all_to_all(group, arrived.view(torch.uint8), sent)
            return _Added(pending or Done(), output, arrived.view(group.size(), -1), source)
        result = output if output.dtype == source.dtype else source.new_empty(output.shape)
        op, divisor = begun(source, group.size(), averages=self._averages)
        work = _collectives.reduce_scatter(group, result, source, op, in_order=self._in_order)
        return _Put(_divided(work, result, divisor), output, result, source)

    def all_reduce_mean(self, group: dist.ProcessGroup, values: Tensor, label: str) -> Pending:
        """See ``Collectives.all_reduce_mean``."""
        group = self._begin(group, label)
        if self.adds_wide and values.dtype.itemsize < 4:
            wide = values.to(wide_dtype(values.dtype))
            op, divisor = begun(wide, group.size(), averages=self._averages)
            pending = _divided(_collectives.all_reduce(group, wide, op), wide, divisor)
            return _Put(pending, values, wide, wide)
        op, divisor = begun(values, group.size(), averages=self._averages)
        work = _collectives.all_reduce(group, values, op, in_order=self._in_order)
        return _divided(work, values, divisor)

    def all_to_all(
        self,
        group: dist.ProcessGroup,
        output: Tensor,
        source: Tensor,
        label: str,
        splits: Splits | None = None,
    ) -> Pending:
        """See ``Collectives.all_to_all``; with ``splits``, slices may differ in size."""
        group = self._begin(group, label)
        lengths, sizes = splits or ((), ())
        work = _collectives.all_to_all(
            group, output, source, sizes, lengths, in_order=self._in_order
        )
        return _Kept(work or Done(), source, self._before)


def _divided(work: dist.Work | None, values: Tensor, divisor: float) -> Pending:
    pending = work or Done()
    return pending if divisor == 1 else ScaledSum(pending, values, divisor)


class _Kept:
    """A collective whose source is kept alive until everything is sent."""

    def __init__(
        self, pending: Pending, source: Tensor, before: Callable[[], None] | None = None
    ) -> None:
        self._pending = pending
        self._source = source
        self._before = before

    def wait(self) -> None:
        if self._before is None:
            self._pending.wait()
            return
        self._before()
        with losing_ranks():
            self._pending.wait()


class _Put:
    def __init__(self, pending: Pending, output: Tensor, result: Tensor, source: Tensor) -> None:
        self._pending = pending
        self._output = output
        self._result = result
        self._source = source  # kept alive until everything is sent

    def wait(self) -> None:
        self._pending.wait()
        if self._result is not self._output:
            self._output.copy_(self._result)


class _Added:
    """An all-to-all in flight whose ``wait`` writes the mean of the rows it brings."""

    def __init__(self, pending: Pending, output: Tensor, rows: Tensor, source: Tensor) -> None:
        self._pending = pending
        self._output = output
        self._rows = rows
        self._source = source  # kept alive until everything is sent

    def wait(self) -> None:
        self._pending.wait()
        first, *others = self._rows.unbind()
        put_mean(self._output, first, others)
