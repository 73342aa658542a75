"""``reduce_input``: whole gradients, rank after rank. See [Note: the tensors of a bucket]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.device import Buffer, Kind, StorageMeter
from fullshard.engine.copies import MOST_DENSE, copy_all
from fullshard.engine.spec import BucketSpec
from fullshard.errors import ProtocolError
from fullshard.layout import Layout, Slot, StridedCopy, in_rows, plan_slots, round_up, subset


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
    meter: StorageMeter
    """That books the copies."""
    is_agreed: bool = True
    """Whether other ranks are known to reduce the same ones."""
    inputs: dict[torch.dtype, ReduceInput] = field(default_factory=dict)
    """By the dtype on the wire."""

    @classmethod
    def of(cls, spec: BucketSpec, numbers: tuple[int, ...], meter: StorageMeter) -> Reduced:
        """``numbers`` of the bucket with ``spec``."""
        names = tuple(param.name for param in spec.layout.params)
        if len(numbers) < len(names):
            spec = replace(spec, layout=subset(spec.layout, numbers))
        return cls(numbers, spec, names, meter)

    @property
    def is_all(self) -> bool:
        """Whether these are all parameters of the bucket."""
        return len(self.numbers) == len(self.names)

    @property
    def row(self) -> int:
        """Elements of one rank's slice, the flags included; the same in every dtype."""
        return self.spec.layout.shard_numel + num_flags(len(self.names))

    def input(self, dtype: torch.dtype, device: torch.device) -> ReduceInput:
        """Where their gradients are copied to, to travel in ``dtype``."""
        buffer = self.inputs.get(dtype)
        if buffer is None:
            buffer = self.inputs[dtype] = ReduceInput(self, dtype, device)
        return buffer

    def flags(self, row: Tensor) -> Tensor:
        """How many ranks, on average, have a gradient for each parameter, in a reduced row."""
        start = self.spec.layout.shard_numel
        flags = row[start : start + len(self.names)]
        return flags.real if flags.is_complex() else flags

    def present(self, flags: Sequence[float]) -> list[bool]:
        """Which of these parameters some rank has a gradient for, by the flags of a reduced row.

        Raises:
            ProtocolError: a rank has one for a parameter that is frozen here.
        """
        known = set(self.numbers)
        unknown = [name for i, name in enumerate(self.names) if flags[i] > 0 and i not in known]
        if unknown:
            raise ProtocolError(
                f"gradients of {', '.join(unknown)} came from other ranks, and this one reduces "
                "none for them: parameters have to be frozen and unfrozen on all ranks alike"
            )
        self.is_agreed = True
        return [flags[number] > 0 for number in self.numbers]

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

    def __init__(self, reduced: Reduced, dtype: torch.dtype, device: torch.device) -> None:
        spec, layout = reduced.spec, reduced.spec.layout
        self.row = reduced.row
        self._reduced = reduced
        self._meter = meter = reduced.meter
        self._ones: dict[torch.dtype, Tensor] = {}
        self._boxes: list[list[StridedCopy] | None] = [[] for _ in layout.params]
        self._targets: list[list[Tensor]] = [[] for _ in layout.params]
        with torch.inference_mode(False):
            self._buffer = Buffer(
                layout.world * self.row, dtype, device, kind=Kind.REDUCE_INPUT, meter=meter
            )
            flat = self._buffer.tensor
            rows = flat.view(layout.world, self.row)
            self._flags = rows[:, layout.shard_numel :]
            self._flag_rows: tuple[Tensor, ...] = ()
            self._cat: _ChunkCat | None = None
            copies = layout.copies(row=self.row)
            if _torch.fuses_copies(device):
                self._cat = _ChunkCat.of(layout, rows)
                copies = tuple(in_rows(copies, most=MOST_DENSE))
                if len(copies) + layout.world <= MOST_DENSE:
                    self._flag_rows = self._flags.unbind()
            for box in copies:
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
        given = [
            grad if grad is None or grad.layout is torch.strided else grad.to_dense()
            for grad in grads
        ]
        missing = [number for number, grad in enumerate(given) if grad is None]
        if self._cat is None or missing or not self._cat.fill(given, self._presence):
            self._copy(given, missing)
        params = self._reduced.spec.layout.params
        numel = sum(param.numel for param in params)
        left_out = sum(params[number].numel for number in missing)
        self._meter.copied((numel - left_out) * self._buffer.tensor.itemsize)
        return self._buffer.tensor

    def _copy(self, grads: Sequence[Tensor | None], missing: Sequence[int]) -> None:
        """Copy box by box."""
        if self._padding:
            torch._foreach_zero_(self._padding)
        sources: list[Tensor] = []
        for grad, boxes in zip(grads, self._boxes, strict=True):
            if grad is None:
                continue
            if boxes is None:
                sources.append(grad)
            else:
                sources.extend(_pieces(grad, boxes))
        targets = self._without(missing) if missing else self._all_targets
        if self._flag_rows and sources:
            copy_all(
                [*targets, *self._flag_rows],
                sources + [self._presence(sources[0].dtype)] * len(self._flag_rows),
            )
        else:
            copy_all(targets, sources)
            self._flags.copy_(self._presence(self._flags.dtype))
        # Not by a list of indices, which a device would make the host wait for.
        for start, stop in _runs([self._reduced.numbers[number] for number in missing]):
            self._flags[:, start:stop].zero_()

    def _presence(self, dtype: torch.dtype) -> Tensor:
        """The flags where no gradient is missing: of frozen parameters there is none."""
        ones = self._ones.get(dtype)
        if ones is None:
            with torch.inference_mode(False):
                ones = torch.ones(self._flags.shape[1], dtype=dtype, device=self._flags.device)
            frozen = set(range(len(self._reduced.names))).difference(self._reduced.numbers)
            for start, stop in _runs(sorted(frozen)):
                ones[start:stop].zero_()
            self._ones[dtype] = ones
        return ones

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


class _ChunkCat:
    """All of it in a kernel a dtype: slots, what is between them, and flags, slice after slice."""

    def __init__(self, layout: Layout, slots: Sequence[Slot], rows: Tensor) -> None:
        self._slots = slots
        self._rows = rows
        starts = [*(slot.offset for slot in slots), layout.shard_numel]
        ends = [0, *(slot.offset + slot.chunk for slot in slots)]
        self._gaps = [start - end for start, end in zip(starts, ends, strict=True)]
        self._constants: dict[torch.dtype, list[Tensor]] = {}

    @classmethod
    def of(cls, layout: Layout, rows: Tensor) -> _ChunkCat | None:
        """None if the parameters are cut otherwise. ``rows`` are the slices, with their flags."""
        slots = plan_slots(layout) if layout.world > 1 else None
        return None if slots is None else cls(layout, slots, rows)

    def fill(
        self, grads: Sequence[Tensor | None], presence: Callable[[torch.dtype], Tensor]
    ) -> bool:
        """Whether these gradients, of which none is missing, have dtypes of one kernel each.

        ``presence`` gives the flags, in the dtype of a gradient.
        """
        dtypes = {grad.dtype for grad in grads if grad is not None}
        if not _torch.casts_in_chunk_cat(dtypes, self._rows.dtype):
            return False
        dtype = min(dtypes, key=lambda one: one.itemsize)
        constants = self._constants.get(dtype)
        if constants is None:
            constants = self._constants[dtype] = self._between(presence(dtype))
        sources = []
        for slot, gap in zip(self._slots, constants, strict=False):
            grad = grads[slot.param]
            assert grad is not None
            sources += [gap, grad.contiguous().view(-1, slot.unit)]
        _torch.chunk_cat([part for part in (*sources, *constants[-2:]) if part.numel()], self._rows)
        return True

    def _between(self, flags: Tensor) -> list[Tensor]:
        """What is before each slot and behind the last, for all ranks; then the flags."""
        world = len(self._rows)
        with torch.inference_mode(False):
            zeros = flags.new_zeros(world * max(self._gaps))
            gaps = [
                zeros[: world * gap].view(world, -1) if gap else zeros[:0] for gap in self._gaps
            ]
            return [*gaps, flags.expand(world, -1).contiguous()]


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


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """First and one past the last of neighbours among ascending ``numbers``."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _pieces(grad: Tensor, boxes: Sequence[StridedCopy]) -> list[Tensor]:
    """Views of one whole gradient, box by box."""
    if not grad.is_contiguous():
        grad = grad.contiguous()
    if len(boxes) == 1:  # it holds all elements, in order
        return [grad.view(boxes[0].sizes)]
    offset = grad.storage_offset()
    return [grad.as_strided(b.sizes, b.param_strides, offset + b.param_offset) for b in boxes]
