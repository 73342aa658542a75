"""``reduce_input``: whole gradients, rank after rank. See [Note: the tensors of a bucket]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from fullshard.device import Buffer, Kind, StorageMeter
from fullshard.engine.spec import BucketSpec
from fullshard.errors import ProtocolError
from fullshard.layout import Layout, StridedCopy, round_up, subset

__all__ = ["ReduceInput", "Reduced", "num_flags"]


def num_flags(num_params: int) -> int:
    """Elements behind each rank's slice that say which of ``num_params`` have a gradient."""
    return round_up(num_params, 8)


@dataclass(eq=False)
class Reduced:
    """The parameters of a bucket that are reduced together: as a rule all of them.

    Where the user froze some after sharding, the others lie closer in ``spec.layout``, which holds
    them alone: nothing is sent for what is frozen, and the shards are what they were.
    """

    numbers: tuple[int, ...]
    """Which they are, ascending; everything else here counts them from 0."""
    spec: BucketSpec
    """That of the bucket, with the layout of these."""
    names: tuple[str, ...]
    """Of all parameters of the bucket, which all have flags."""
    is_agreed: bool = True
    """Whether other ranks are known to reduce the same ones."""
    inputs: dict[torch.dtype, ReduceInput] = field(default_factory=dict)
    """By the dtype on the wire."""

    @classmethod
    def of(cls, spec: BucketSpec, numbers: tuple[int, ...]) -> Reduced:
        """``numbers`` of the bucket with ``spec``."""
        names = tuple(param.name for param in spec.layout.params)
        if len(numbers) < len(names):
            spec = replace(spec, layout=subset(spec.layout, numbers))
        return cls(numbers, spec, names)

    @property
    def is_all(self) -> bool:
        """Whether these are all parameters of the bucket."""
        return len(self.numbers) == len(self.names)

    @property
    def row(self) -> int:
        """Elements of one rank's slice, the flags included; the same in every dtype."""
        return self.spec.layout.shard_numel + num_flags(len(self.names))

    def input(self, dtype: torch.dtype, device: torch.device, meter: StorageMeter) -> ReduceInput:
        """Where their gradients are copied to, to travel in ``dtype``."""
        buffer = self.inputs.get(dtype)
        if buffer is None:
            buffer = self.inputs[dtype] = ReduceInput(self, dtype, device, meter)
        return buffer

    def flags(self, row: Tensor) -> list[bool]:
        """Which of these parameters some rank has a gradient for, as read from a reduced row.

        Raises:
            ProtocolError: a rank has one for a parameter that is frozen here.
        """
        start = self.spec.layout.shard_numel
        flags = [flag > 0 for flag in row[start : start + len(self.names)].tolist()]
        known = set(self.numbers)
        unknown = [name for i, name in enumerate(self.names) if flags[i] and i not in known]
        if unknown:
            raise ProtocolError(
                f"gradients of {', '.join(unknown)} came from other ranks, and this one reduces "
                "none for them: parameters have to be frozen and unfrozen on all ranks alike"
            )
        self.is_agreed = True
        return [flags[number] for number in self.numbers]

    def parts(self, row: Tensor, numbers: Sequence[int]) -> list[Tensor]:
        """This rank's pieces in ``row`` of some parameters, by their numbers; then all flags."""
        pieces = [self.spec.pieces[self.numbers.index(number)] for number in numbers]
        flags = row[self.spec.layout.shard_numel :]
        return [*(row.narrow(0, piece.offset, piece.numel) for piece in pieces), flags]


class ReduceInput:
    """The buffer that gradients are copied to, in one batch that casts, to be reduced.

    Behind the slice of each rank it has one element per parameter of the bucket, 1 where it got a
    gradient, up to a multiple of 8, which are at least 16 bytes.
    """

    def __init__(
        self, reduced: Reduced, dtype: torch.dtype, device: torch.device, meter: StorageMeter
    ) -> None:
        spec, layout = reduced.spec, reduced.spec.layout
        self.row = reduced.row
        self._numbers = reduced.numbers
        self._frozen = sorted(set(range(len(reduced.names))).difference(reduced.numbers))
        self._spec = spec
        self._meter = meter
        self._numel = sum(param.numel for param in layout.params)
        self._boxes: list[list[StridedCopy] | None] = [[] for _ in layout.params]
        self._targets: list[list[Tensor]] = [[] for _ in layout.params]
        with torch.inference_mode(False):
            self._buffer = Buffer(
                layout.world * self.row, dtype, device, kind=Kind.REDUCE_INPUT, meter=meter
            )
            flat = self._buffer.tensor
            self._flags = flat.view(layout.world, self.row)[:, layout.shard_numel :]
            self._flag_of = self._flags.unbind(1)
            for box in layout.copies(row=self.row):
                view = flat.as_strided(box.sizes, box.staging_strides, box.staging_offset)
                param, boxes = layout.params[box.param], self._boxes[box.param]
                if box.sizes == (param.numel,):  # it lies in one slice: copied as it is
                    self._boxes[box.param] = None
                    view = view.view(param.shape)
                elif boxes is not None:
                    boxes.append(box)
                self._targets[box.param].append(view)
            self._padding = _padding(layout, self.row, flat) if spec.clean_padding else []
            self._all_targets = list(chain.from_iterable(self._targets))
            self._buffer.free()

    def fill(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Copy ``grads``, whole, of any dtypes; zeros for those that are None."""
        self._buffer.allocate()
        if self._padding:
            torch._foreach_zero_(self._padding)
        sources: list[Tensor] = []
        missing: list[int] = []
        for number, (grad, boxes) in enumerate(zip(grads, self._boxes, strict=True)):
            if grad is None:
                missing.append(number)
                continue
            if grad.layout is not torch.strided:
                grad = grad.to_dense()
            if boxes is None:
                sources.append(grad)
            else:
                sources.extend(_pieces(grad, boxes))
        targets = self._without(missing) if missing else self._all_targets
        if targets:
            torch._foreach_copy_(targets, sources)
        self._flags.fill_(1)
        unset = [*self._frozen, *(self._numbers[number] for number in missing)]
        if unset:  # not by a list of indices, which an accelerator would wait for
            torch._foreach_zero_([self._flag_of[number] for number in unset])
        left_out = sum(self._spec.layout.params[number].numel for number in missing)
        self._meter.copied((self._numel - left_out) * self._buffer.tensor.itemsize)
        return self._buffer.tensor

    def _without(self, missing: Sequence[int]) -> list[Tensor]:
        """The targets of the other parameters; zeros for these."""
        zeros = [view for number in missing for view in self._targets[number]]
        if zeros:
            torch._foreach_zero_(zeros)
        left_out = set(missing)
        others = (views for i, views in enumerate(self._targets) if i not in left_out)
        return list(chain.from_iterable(others))

    def free(self) -> None:
        """Give the memory back."""
        self._buffer.free()


def _padding(layout: Layout, row: int, flat: Tensor) -> list[Tensor]:
    """Views of what belongs to no parameter; of all, to be sure, where it cannot be told."""
    if not layout.zero_copy:
        return [flat]
    ends = [
        (at, at + p.numel) for at, p in zip(layout.unsharded_offsets, layout.params, strict=True)
    ]
    slices = ((rank * layout.shard_numel,) * 2 for rank in range(1, layout.world))
    last = (layout.unsharded_numel,) * 2
    found, done = [], 0
    for start, stop in sorted((*ends, *slices, last)):
        if start > done:
            rank, within = divmod(done, layout.shard_numel)
            found.append(flat.narrow(0, rank * row + within, start - done))
        done = max(done, stop)
    return found


def _pieces(grad: Tensor, boxes: Sequence[StridedCopy]) -> list[Tensor]:
    """Views of one whole gradient, box by box."""
    if not grad.is_contiguous():
        grad = grad.contiguous()
    if len(boxes) == 1:  # it holds all elements, in order
        return [grad.view(boxes[0].sizes)]
    offset = grad.storage_offset()
    return [grad.as_strided(b.sizes, b.param_strides, offset + b.param_offset) for b in boxes]
