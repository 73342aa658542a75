"""Collectives whose data is made smaller by a codec before it travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fullshard.comm.codecs import ENCODED, Codec
from fullshard.comm.protocol import Collectives, Pending, Then, Wrapper, put


@dataclass(frozen=True)
class Encoded(Wrapper):
    """The collectives of ``inner``, a group of two or more ranks, with data encoded by ``codec``.

    Gathers decode this rank's own part as well, so that all ranks have the same bits. In a mean,
    encoded slices go to the ranks that keep them, which add up in fp32. A mean of whole values on
    all ranks gathers the encoded means after that. Data of a dtype that is not in ``ENCODED`` is
    sent as it is.
    """

    codec: Codec
    exact: int = 0
    """The number of elements at the end of each rank's slice of a reduction that are sent as is."""
    watch: Callable[[Codec, Tensor], object] | None = None
    """Called with all values that are encoded, 2-D, before that."""

    @property
    def adds_wide(self) -> bool:
        """True: sums are in fp32, whatever ``inner`` does."""
        return True

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """See ``Collectives.all_gather``; sources may have other dtypes than the outputs."""
        if outputs[0].dtype not in ENCODED:
            return self.inner.all_gather(outputs, sources)
        values = [source.view(1, -1) for source in sources]
        for one in values:
            self._look(one)
        sent = self.codec.encode(values)
        arrived = sent.new_empty(self.world, sent.shape[1])
        pending = self.inner.all_gather([arrived.view(-1)], [sent.view(-1)])
        rows = [output.view(self.world, -1) for output in outputs]
        return Then(pending, partial(self.codec.decode, arrived, rows), sent)

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """See ``Collectives.reduce_scatter_mean``."""
        if source.dtype not in ENCODED:
            return self.inner.reduce_scatter_mean(output, source)
        rows = source.view(self.world, -1)
        self._look(rows[:, : rows.shape[1] - self.exact])
        sent = self.codec.encode([rows], self.exact)
        if self.codec.dtype is not None and self.inner.adds_wide:
            return self.inner.reduce_scatter_mean(output, sent.view(-1))
        arrived = torch.empty_like(sent)
        pending = self.inner.all_to_all(arrived.view(-1), sent.view(-1))
        return Then(pending, partial(self._put_mean, output, arrived, rows), sent)

    def _put_mean(self, output: Tensor, arrived: Tensor, rows: Tensor) -> None:
        """Write the mean of the rows ``arrived`` into ``output``; ``rows`` may be overwritten."""
        if self.codec.dtype is None:
            is_wide = rows.dtype is torch.float32
            wide = rows if is_wide else torch.empty_like(rows, dtype=torch.float32)
            self.codec.decode(arrived, [wide], self.exact)
            arrived = wide
        if output.dtype is torch.float32:
            torch.mean(arrived, 0, dtype=torch.float32, out=output)
        else:
            output.copy_(arrived.mean(0, dtype=torch.float32))

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """See ``Collectives.all_reduce_mean``; the second hop starts in ``wait``."""
        if values.dtype not in ENCODED:
            return self.inner.all_reduce_mean(values)
        if self.codec.dtype is not None and self.inner.adds_wide:
            self._look(values[: values.numel() - self.exact].view(1, -1))
            sent = self.codec.encode([values.view(1, -1)]).view(-1)
            pending = self.inner.all_reduce_mean(sent)
            return Then(pending, partial(put, sent, values), sent)
        numel = values.numel() - self.exact
        length = -(-numel // (self.world * self.codec.block)) * self.codec.block
        rows = values.new_zeros(self.world, length + self.exact)
        filled, rest = divmod(numel, length) if length else (0, 0)
        rows[:filled, :length] = values[: filled * length].view(filled, length)
        if rest:
            rows[filled, :rest] = values[filled * length : numel]
        rows[:, length:] = values[numel:]
        own = values.new_empty(length + self.exact)
        pending = self.reduce_scatter_mean(own, rows.view(-1))
        return Then(pending, partial(self._second_hop, values, own, length), rows)

    def _look(self, values: Tensor) -> None:
        """Let ``watch`` see ``values``, unless encoding changes nothing."""
        if self.watch is not None and values.dtype.itemsize > getattr(
            self.codec.dtype, "itemsize", 0
        ):
            self.watch(self.codec, values)

    def _second_hop(self, values: Tensor, own: Tensor, length: int) -> None:
        """Gather the slices of means into ``values``; all ranks have the exact elements already."""
        numel = values.numel() - self.exact
        values[numel:].copy_(own[length:])
        if numel:
            whole = values.new_empty(self.world * length)
            means = replace(self, codec=self.codec.for_means)
            means.all_gather([whole], [own[:length]]).wait()
            values[:numel].copy_(whole[:numel])


def encoded(
    comm: Collectives,
    codec: Codec | None,
    *,
    exact: int = 0,
    watch: Callable[[Codec, Tensor], object] | None = None,
) -> Collectives:
    """Return ``comm`` with ``codec``; one rank alone, or no codec, leaves ``comm`` as it is."""
    return comm if codec is None or comm.world == 1 else Encoded(comm, codec, exact, watch)
