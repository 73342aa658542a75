"""The ``reduce_input``: unsharded gradients, rank by rank. See [Note: the tensors of a bucket]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from fullshard._torch import device as _device
from fullshard.device import Buffer, BufferKind, StorageMeter
from fullshard.engine.spec import BucketSpec, num_flags
from fullshard.engine.unshard import MOST_DENSE, copy_all
from fullshard.errors import ProtocolError
from fullshard.layout import Layout, Slot, StridedCopy, in_rows, plan_slots, subset


@dataclass(eq=False)
class Reduced:
    """The parameters of a bucket that are reduced together, usually all of them.

    If the user froze some after sharding, ``spec.layout`` holds the other parameters alone, closer
    together: nothing is sent for frozen parameters, and the shards stay as they were.
    """

    indices: tuple[int, ...]
    """The parameters' indices in the bucket, ascending; all else here counts these from 0."""
    spec: BucketSpec
    """The spec of the bucket, with the layout of these parameters alone."""
    names: tuple[str, ...]
    """The FQNs of all parameters of the bucket, all of which have flags."""
    meter: StorageMeter
    """The meter that records the copies."""
    is_agreed: bool = True
    """True if other ranks are known to reduce the same parameters."""
    inputs: dict[torch.dtype, ReduceInput] = field(default_factory=dict)
    """The buffers, by dtype on the wire."""

    @classmethod
    def of(cls, spec: BucketSpec, indices: tuple[int, ...], meter: StorageMeter) -> Reduced:
        """Return the parameters ``indices`` of the bucket with ``spec``."""
        names = tuple(param.name for param in spec.layout.params)
        if len(indices) < len(names):
            spec = replace(spec, layout=subset(spec.layout, indices))
        return cls(indices, spec, names, meter)

    @property
    def row(self) -> int:
        """Number of elements of one rank's slice, flags included; the same for every dtype."""
        return self.spec.layout.shard_numel + num_flags(len(self.names))

    def input(self, dtype: torch.dtype, device: torch.device) -> ReduceInput:
        """Return the buffer for gradients that travel in ``dtype``; make it at the first call."""
        buffer = self.inputs.get(dtype)
        if buffer is None:
            buffer = self.inputs[dtype] = ReduceInput(self, dtype, device)
        return buffer

    def flags(self, row: Tensor) -> Tensor:
        """Return the flags in a reduced row: above 0 for a parameter if any rank had a gradient."""
        start = self.spec.layout.shard_numel
        flags = row[start : start + len(self.names)]
        return flags.real if flags.is_complex() else flags

    def present(self, flags: Sequence[float]) -> list[bool]:
        """Return, by the flags of a reduced row, whether some rank has each parameter's gradient.

        Raises:
            ProtocolError: a rank has a gradient for a parameter that is frozen here.
        """
        known = set(self.indices)
        unknown = [name for i, name in enumerate(self.names) if flags[i] > 0 and i not in known]
        if unknown:
            raise ProtocolError(
                f"gradients of {', '.join(unknown)} came from other ranks, and this one reduces "
                "none for them: parameters have to be frozen and unfrozen on all ranks alike"
            )
        self.is_agreed = True
        return [flags[index] > 0 for index in self.indices]

    def parts(self, row: Tensor, indices: Sequence[int]) -> list[Tensor]:
        """Return views of ``row``: this rank's pieces of ``indices``, then all flags."""
        pieces = [self.spec.pieces[self.indices.index(index)] for index in indices]
        flags = row[self.spec.layout.shard_numel :]
        return [*(row.narrow(0, piece.offset, piece.numel) for piece in pieces), flags]


class ReduceInput:
    """The buffer to which gradients are copied and cast, in one batch, before the reduction.

    Behind each rank's slice are the flags: one element per parameter of the bucket, 1 if it has a
    gradient. The flags are padded to a multiple of 8 elements, which are at least 16 bytes.
    """

    def __init__(self, reduced: Reduced, dtype: torch.dtype, device: torch.device) -> None:
        spec, layout = reduced.spec, reduced.spec.layout
        self.row = reduced.row
        self._reduced = reduced
        self._meter = meter = reduced.meter
        self._numels = [param.numel for param in layout.params]
        self._ones: dict[torch.dtype, Tensor] = {}
        self._boxes: list[list[StridedCopy] | None] = [[] for _ in layout.params]
        self._targets: list[list[Tensor]] = [[] for _ in layout.params]
        with torch.inference_mode(False):
            self._buffer = Buffer(
                layout.world * self.row, dtype, device, kind=BufferKind.REDUCE_INPUT, meter=meter
            )
            flat = self._buffer.tensor
            rows = flat.view(layout.world, self.row)
            self._flags = rows[:, layout.shard_numel :]
            self._numel = sum(self._numels) + self._flags.numel()
            self._flag_rows: tuple[Tensor, ...] = ()
            self._cat: _ChunkCat | None = None
            copies = layout.copies(row=self.row)
            if _device.fuses_copies(device):
                self._cat = _ChunkCat.of(layout, rows)
                copies = tuple(in_rows(copies, most=MOST_DENSE))
                if len(copies) + layout.world <= MOST_DENSE:
                    self._flag_rows = self._flags.unbind()
            for box in copies:
                view = flat.as_strided(box.sizes, box.staging_strides, box.staging_offset)
                param, boxes = layout.params[box.param], self._boxes[box.param]
                if box.sizes == (param.numel,):  # all of the parameter is in one slice
                    self._boxes[box.param] = None
                    view = view.view(param.shape)
                elif boxes is not None:
                    boxes.append(box)
                self._targets[box.param].append(view)
            cleans = spec.clean_padding or spec.wire.has_blocks
            self._padding = _padding(layout, self.row, flat) if cleans else []
            self._all_targets = list(chain.from_iterable(self._targets))
            self._buffer.free()

    def allocate(self) -> None:
        """Allocate the memory, unless it is allocated."""
        self._buffer.allocate()

    def fill(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Copy unsharded ``grads`` of any dtypes, None as zeros; return the buffer's tensor."""
        self._buffer.allocate()
        given = [
            grad if grad is None or grad.layout is torch.strided else grad.to_dense()
            for grad in grads
        ]
        missing = [index for index, grad in enumerate(given) if grad is None]
        if self._cat is None or missing or not self._cat.fill(given, self._presence):
            self._copy(given, missing)
        written = self._numel - sum(self._numels[index] for index in missing)
        self._meter.copied(written * self._buffer.tensor.itemsize)
        self._look_at_rounding(given)
        return self._buffer.tensor

    def _look_at_rounding(self, grads: Sequence[Tensor | None]) -> None:
        """Compare the buffer with ``grads`` if they were rounded for the wire, and if asked to."""
        spec, narrow = self._reduced.spec, self._buffer.tensor
        if not spec.wire_check.enabled:
            return
        codec = spec.wire.reducing
        if codec is None or narrow.dtype is not codec.dtype:
            return
        exact = ReduceInput(self._reduced, torch.float32, narrow.device)
        rows = (one.view(-1, self.row) for one in (exact.fill(grads), narrow))
        spec.wire_check.compare("reduced", *(one[:, : spec.layout.shard_numel] for one in rows))
        exact.free()

    def _copy(self, grads: Sequence[Tensor | None], missing: Sequence[int]) -> None:
        """Copy the gradients box by box."""
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
        # A list of indices would make the host wait for the device.
        for start, stop in _runs([self._reduced.indices[index] for index in missing]):
            self._flags[:, start:stop].zero_()

    def _presence(self, dtype: torch.dtype) -> Tensor:
        """Return the flags for when no gradient is missing; frozen parameters have none."""
        ones = self._ones.get(dtype)
        if ones is None:
            with torch.inference_mode(False):
                ones = torch.ones(self._flags.shape[1], dtype=dtype, device=self._flags.device)
            frozen = set(range(len(self._reduced.names))).difference(self._reduced.indices)
            for start, stop in _runs(sorted(frozen)):
                ones[start:stop].zero_()
            self._ones[dtype] = ones
        return ones

    def _without(self, missing: Sequence[int]) -> list[Tensor]:
        """Zero the targets of the missing parameters, and return those of the rest."""
        zeros = [view for index in missing for view in self._targets[index]]
        if zeros:
            torch._foreach_zero_(zeros)
        left_out = set(missing)
        others = (views for i, views in enumerate(self._targets) if i not in left_out)
        return list(chain.from_iterable(others))

    def free(self) -> None:
        """Give the memory back."""
        self._buffer.free()

    def leave(self) -> None:
        """Forget the memory; see ``Buffer.leave``."""
        self._buffer.leave()


class _ChunkCat:
    """A copier that fills slots, the gaps between slots, and flags with one kernel per dtype."""

    def __init__(self, layout: Layout, slots: Sequence[Slot], rows: Tensor) -> None:
        self._slots = slots
        self._rows = rows
        starts = [*(slot.offset for slot in slots), layout.shard_numel]
        ends = [0, *(slot.offset + slot.chunk for slot in slots)]
        self._gaps = [start - end for start, end in zip(starts, ends, strict=True)]
        self._constants: dict[torch.dtype, list[Tensor]] = {}

    @classmethod
    def of(cls, layout: Layout, rows: Tensor) -> _ChunkCat | None:
        """Return a copier into ``rows``, the slices with flags; None if the layout has no slots."""
        slots = plan_slots(layout) if layout.world > 1 else None
        return None if slots is None else cls(layout, slots, rows)

    def fill(
        self, grads: Sequence[Tensor | None], presence: Callable[[torch.dtype], Tensor]
    ) -> bool:
        """Copy these gradients, none missing; return False if their dtypes do not fit the kernel.

        ``presence`` returns the flags in the dtype of a gradient.
        """
        dtypes = {grad.dtype for grad in grads if grad is not None}
        if not _device.casts_in_chunk_cat(dtypes, self._rows.dtype):
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
        _device.chunk_cat(
            [part for part in (*sources, *constants[-2:]) if part.numel()], self._rows
        )
        return True

    def _between(self, flags: Tensor) -> list[Tensor]:
        """Return zeros for the gaps before each slot and behind the last, then all ranks' flags."""
        world = len(self._rows)
        with torch.inference_mode(False):
            zeros = flags.new_zeros(world * max(self._gaps))
            gaps = [
                zeros[: world * gap].view(world, -1) if gap else zeros[:0] for gap in self._gaps
            ]
            return [*gaps, flags.expand(world, -1).contiguous()]


def _padding(layout: Layout, row: int, flat: Tensor) -> list[Tensor]:
    """Return views of the padding; all of the buffer if the layout cannot tell the padding."""
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


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and stop of each run of neighbors in ascending ``indices``."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs


def _pieces(grad: Tensor, boxes: Sequence[StridedCopy]) -> list[Tensor]:
    """Return views of one unsharded gradient, box by box."""
    if not grad.is_contiguous():
        grad = grad.contiguous()
    if len(boxes) == 1:  # the box has all elements, in order
        return [grad.view(boxes[0].sizes)]
    offset = grad.storage_offset()
    return [grad.as_strided(b.sizes, b.param_strides, offset + b.param_offset) for b in boxes]
