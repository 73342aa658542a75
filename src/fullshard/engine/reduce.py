"""The way from whole gradients to sharded ones. See [Note: the tensors of a bucket]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.comm import Pending
from fullshard.device import Buffer, Kind, Lane, Lanes, StorageMeter
from fullshard.engine.spec import BucketSpec
from fullshard.layout import StridedCopy

__all__ = ["Gradients"]


class _GradShard:
    """One slice of a reduction's result, with the gradients that are views of it.

    Making a DTensor costs as much host time as adding a small one up, so the set is used again
    for the next step, if nobody but us holds any part of it.
    """

    def __init__(self, spec: BucketSpec, flat: Tensor) -> None:
        self.flat = flat  # 1-D, layout.shard_numel elements and the flags
        self.locals = spec.local_views(flat)
        self.shown = [spec.form.wrap(i, local) for i, local in enumerate(self.locals)]
        self._num_aliases = list(map(_torch.num_aliases, self.locals))

    def is_free(self) -> bool:
        """Whether no one else refers to the gradients or to their memory."""
        return (
            _torch.none_is_held(self.shown)
            and list(map(_torch.num_aliases, self.locals)) == self._num_aliases
        )


@dataclass(frozen=True)
class _Reduction:
    """A reduce-scatter that was started."""

    pending: Pending
    result: _GradShard
    present: list[bool]  # which parameters have a gradient on this rank


class Gradients:
    """Takes gradients off the unsharded parameters and puts reduced ones on the sharded.

    A reduction has the same size on all ranks, whichever parameters got a gradient: those without
    send zeros, and one element per parameter says whether some rank had one. So ``.grad`` stays
    None exactly where no rank computed one, without an extra collective.
    """

    def __init__(
        self,
        spec: BucketSpec,
        params: Sequence[nn.Parameter],
        sharded_params: Sequence[nn.Parameter],
        lanes: Lanes,
        meter: StorageMeter,
    ) -> None:
        self.sharded_params = sharded_params
        self.params = params
        self.pending: list[Tensor | None] = [None] * len(params)
        self._spec = spec
        self._lanes = lanes
        self._in_flight: _Reduction | None = None
        self._last: _GradShard | None = None
        dtype = spec.reduce_dtype or params[0].dtype
        layout = spec.layout
        # Behind each slice one element per parameter, up to a whole number of 16-byte words.
        word = max(1, 16 // dtype.itemsize)
        self._row = layout.shard_numel + -(-len(params) // word) * word
        self._boxes: list[list[StridedCopy]] = [[] for _ in params]
        with torch.inference_mode(False):
            self._input = Buffer(
                layout.world * self._row,
                dtype,
                params[0].device,
                kind=Kind.REDUCE_INPUT,
                meter=meter,
            )
            slices = self._input.tensor.view(layout.world, self._row)
            self._flags = slices[:, layout.shard_numel :]
            self._targets: list[list[Tensor]] = [[] for _ in params]
            for box in layout.copies(row=self._row):
                self._boxes[box.param].append(box)
                self._targets[box.param].append(
                    self._input.tensor.as_strided(
                        box.sizes, box.staging_strides, box.staging_offset
                    )
                )
            self._input.free()

    def start(self) -> None:
        """Start to reduce what the parameters have, and what was pending."""
        grads = self._take()
        with torch.no_grad():
            source = self._fill(grads)
            self._lanes.join(Lane.REDUCE, Lane.COMPUTE)
            with self._lanes.on(Lane.REDUCE):
                result = self._result_for(source)
                pending = self._spec.comm.reduce_scatter_mean(result.flat, source)
        self._in_flight = _Reduction(pending, result, [grad is not None for grad in grads])

    def _result_for(self, source: Tensor) -> _GradShard:
        """Last step's result if it is free, else a new one."""
        if self._last is None or not self._last.is_free():
            dtype = self.sharded_params[0].dtype
            flat = torch.empty(self._row, dtype=dtype, device=source.device)
            self._last = _GradShard(self._spec, flat)
        return self._last

    def finish(self) -> None:
        """Put the reduced gradients on the sharded parameters."""
        if self._in_flight is None:
            return
        reduction, self._in_flight = self._in_flight, None
        with torch.no_grad(), self._lanes.on(Lane.REDUCE):
            self._lanes.wait(reduction.pending)
            self._assign(reduction.result, self._present_anywhere(reduction))
        self._lanes.join(Lane.COMPUTE, Lane.REDUCE)
        self._input.free()

    def accumulate(self) -> None:
        """Keep the gradients whole until a backward that reduces.

        They add up in the wider of the dtypes of computation and reduction, so that waiting loses
        no bits which reducing at once would have kept.
        """
        dtype = torch.promote_types(self.params[0].dtype, self._input.tensor.dtype)
        self.pending = [None if grad is None else grad.to(dtype) for grad in self._take()]

    def discard(self) -> None:
        """Forget what a backward that died left behind."""
        for param in self.params:
            param.grad = None

    def forget(self) -> None:
        """Forget everything that was not reduced."""
        self.discard()
        self.pending = [None] * len(self.params)

    def _take(self) -> list[Tensor | None]:
        """Take off each parameter's gradient, with what is pending for it added."""
        grads = [None if param.grad is None else param.grad.detach() for param in self.params]
        self.discard()
        pending, self.pending = self.pending, [None] * len(grads)
        both = [
            (waited, grad)
            for waited, grad in zip(pending, grads, strict=True)
            if waited is not None and grad is not None
        ]
        if both:
            sums = [waited for waited, _ in both]
            torch._foreach_add_(sums, [grad.to(waited.dtype) for waited, grad in both])
        return [grads[i] if waited is None else waited for i, waited in enumerate(pending)]

    def _fill(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Write ``reduce_input``: one batch that casts and copies."""
        self._input.allocate()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        missing: list[Tensor] = []
        for grad, views, boxes in zip(grads, self._targets, self._boxes, strict=True):
            if grad is None:
                missing.extend(views)
                continue
            targets.extend(views)
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
        return self._input.tensor

    def _present_anywhere(self, reduction: _Reduction) -> list[bool]:
        """Which parameters some rank has a gradient for."""
        if all(reduction.present):
            return reduction.present  # no need to ask the device, which would wait for it
        num = len(reduction.present)
        shard_numel = self._spec.layout.shard_numel
        flags = reduction.result.flat[shard_numel : shard_numel + num]
        return [flag > 0 for flag in flags.tolist()]

    def _assign(self, result: _GradShard, present: Sequence[bool]) -> None:
        sums: list[Tensor] = []
        parts: list[Tensor] = []
        for i, param in enumerate(self.sharded_params):
            if not (present[i] and param.requires_grad):
                continue
            if param.grad is None:
                param.grad = result.shown[i]
            else:
                sums.append(self._spec.form.local(param.grad))
                parts.append(result.locals[i])
        if sums:
            torch._foreach_add_(sums, parts)
        for i, param in enumerate(self.sharded_params):
            # As autograd would have called them; an optimizer may step in one.
            for hook in _torch.post_accumulate_grad_hooks(param):
                if present[i] and param.requires_grad:
                    hook(param)


def _pieces(grad: Tensor, boxes: Sequence[StridedCopy]) -> list[Tensor]:
    """Views of one whole gradient, box by box."""
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    if not grad.is_contiguous():
        grad = grad.contiguous()
    if len(boxes) == 1:  # it holds all elements, in order
        return [grad.view(boxes[0].sizes)]
    offset = grad.storage_offset()
    return [grad.as_strided(b.sizes, b.param_strides, offset + b.param_offset) for b in boxes]
