"""``reduce_input``: whole gradients, rank after rank. See [Note: the tensors of a bucket]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fullshard.device import Buffer, Kind, StorageMeter
from fullshard.engine.spec import BucketSpec
from fullshard.layout import StridedCopy

__all__ = ["ReduceInput"]


class ReduceInput:
    """The buffer that gradients are copied to, in one batch that casts, to be reduced.

    Behind the slice of each rank it has one element per parameter, 1 where it got a gradient, up
    to a whole number of 16-byte words.
    """

    def __init__(
        self, spec: BucketSpec, dtype: torch.dtype, device: torch.device, meter: StorageMeter
    ) -> None:
        layout = spec.layout
        self.row = row_numel(spec, dtype)
        self._meter = meter
        self._numel = sum(param.numel for param in layout.params)
        self._boxes: list[list[StridedCopy]] = [[] for _ in layout.params]
        self._targets: list[list[Tensor]] = [[] for _ in layout.params]
        with torch.inference_mode(False):
            self._buffer = Buffer(
                layout.world * self.row, dtype, device, kind=Kind.REDUCE_INPUT, meter=meter
            )
            flat = self._buffer.tensor
            self._flags = flat.view(layout.world, self.row)[:, layout.shard_numel :]
            for box in layout.copies(row=self.row):
                view = flat.as_strided(box.sizes, box.staging_strides, box.staging_offset)
                if box.sizes == (layout.params[box.param].numel,):  # in one slice, as it is
                    self._targets[box.param].append(view.view(layout.params[box.param].shape))
                    continue
                self._boxes[box.param].append(box)
                self._targets[box.param].append(view)
            self._buffer.free()

    def fill(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Copy ``grads``, whole, of any dtypes; zeros for those that are None."""
        self._buffer.allocate()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        missing: list[Tensor] = []
        for grad, views, boxes in zip(grads, self._targets, self._boxes, strict=True):
            if grad is None:
                missing.extend(views)
                continue
            targets.extend(views)
            if views:
                sources.extend(_pieces(grad, boxes))
        if targets:
            torch._foreach_copy_(targets, sources)
        if missing:
            torch._foreach_zero_(missing)
            self._flags[:, : len(grads)] = torch.tensor(
                [grad is not None for grad in grads], dtype=self._flags.dtype
            ).to(self._flags.device, non_blocking=True)
        else:
            self._flags.fill_(1)
        left_out = sum(map(Tensor.numel, missing)) if missing else 0
        self._meter.copied((self._numel - left_out) * self._buffer.tensor.itemsize)
        return self._buffer.tensor

    def free(self) -> None:
        """Give the memory back."""
        self._buffer.free()


def row_numel(spec: BucketSpec, dtype: torch.dtype) -> int:
    """Elements of one rank's slice, the flags included."""
    word = max(1, 16 // dtype.itemsize)
    return spec.layout.shard_numel + -(-len(spec.layout.params) // word) * word


def _pieces(grad: Tensor, boxes: Sequence[StridedCopy]) -> list[Tensor]:
    """Views of one whole gradient, box by box; itself where it is copied as it is."""
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    if not boxes:
        return [grad]
    if not grad.is_contiguous():
        grad = grad.contiguous()
    if len(boxes) == 1:  # it holds all elements, in order
        return [grad.view(boxes[0].sizes)]
    offset = grad.storage_offset()
    return [grad.as_strided(b.sizes, b.param_strides, offset + b.param_offset) for b in boxes]
