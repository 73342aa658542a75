"""Tensors whose memory is freed and allocated again, and a meter of that memory."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fullshard._torch import memory as _memory
from fullshard.comm import Label

_READ_WHEN_FREED = (
    "parameters of {} were read while the unit is resharded and its memory is freed. Something "
    "outside of the unit's forward and backward keeps a parameter, a view of one, or an autograd "
    "graph that reads one. Return the kept tensor from the forward, or backpropagate it together "
    "with the output. Or call unshard() of the unit's module before the read, or keep the unit "
    "unsharded from forward to backward (reshard_after_forward=False; SHARD_GRAD_OP for "
    "FullyShardedDataParallel)"
)


class BufferKind(enum.StrEnum):
    """The purpose of a buffer; see the note in ``engine/bucket.py``."""

    UNSHARDED = "unsharded"
    SECONDARY = "secondary"
    GATHER_OUTPUT = "gather_output"
    ALL_GATHER_INPUT = "all_gather_input"
    REDUCE_INPUT = "reduce_input"
    FULL = "full"


Watch = Callable[[BufferKind, int, torch.UntypedStorage | None], object]
"""Called on each change with the kind of the buffer, the bytes added, and the storage if known."""


class StorageMeter:
    """A count of the bytes that buffers hold now and held at their peak, and of bytes copied.

    ``copied_nbytes`` counts the bytes written by copies and casts between shards and unsharded
    parameters, in both directions; bytes that collectives write do not count. ``watch``, if set,
    is called on each change.
    """

    def __init__(self) -> None:
        self.copied_nbytes = 0
        self.held_nbytes: Counter[BufferKind] = Counter()
        self.peak_nbytes: Counter[BufferKind] = Counter()
        self.watch: Watch | None = None

    def change(
        self, kind: BufferKind, nbytes: int, storage: torch.UntypedStorage | None = None
    ) -> None:
        """Add ``nbytes`` of ``storage`` to the bytes held; negative: memory was freed."""
        held = self.held_nbytes[kind] = self.held_nbytes[kind] + nbytes
        if held > self.peak_nbytes[kind]:
            self.peak_nbytes[kind] = held
        if self.watch is not None:
            self.watch(kind, nbytes, storage)

    @contextmanager
    def holding(self, kind: BufferKind, nbytes: int) -> Iterator[None]:
        """Count ``nbytes`` of ordinary tensors as held during the ``with`` block."""
        self.change(kind, nbytes)
        try:
            yield
        finally:
            self.change(kind, -nbytes)

    def copied(self, nbytes: int) -> None:
        """Record a copy that wrote ``nbytes``."""
        self.copied_nbytes += nbytes

    def reset_peak(self) -> None:
        """Set the peak to the bytes held now."""
        self.peak_nbytes = Counter(self.held_nbytes)


class Buffer:
    """A 1-D tensor whose storage is allocated and freed repeatedly.

    ``tensor`` and its views stay valid objects, but have memory only while ``allocated``. Reading
    them at other times kills the process, or raises an error that names ``label`` where PyTorch can
    refuse reads. A buffer starts allocated, because views can only be made of memory;
    make the views, then call ``free``. Memory belongs to the stream that is current when it is
    allocated, and ``free`` returns it to that stream even if another stream is current. So the
    stream must wait for all uses of the memory before it allocates again.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        kind: BufferKind,
        meter: StorageMeter,
        label: Label | None = None,
    ) -> None:
        self.nbytes = numel * dtype.itemsize
        self.kind = kind
        self.allocated = True
        self._meter = meter
        # An inference tensor could not be written outside inference mode.
        with torch.inference_mode(False):
            self.tensor: Tensor = torch.empty(numel, dtype=dtype, device=device)
            self._storage = self.tensor.untyped_storage()
        self._label = label if _memory.refuses_reads(self._storage.device) else None
        meter.change(kind, self.nbytes, self._storage)

    @classmethod
    def of(cls, tensor: Tensor, *, kind: BufferKind, meter: StorageMeter, label: Label) -> Buffer:
        """Return an allocated buffer around the memory of an existing tensor."""
        buffer = cls(0, torch.uint8, tensor.device, kind=kind, meter=meter, label=label)
        buffer.tensor = tensor
        buffer._storage = tensor.untyped_storage()
        buffer.nbytes = buffer._storage.nbytes()
        meter.change(kind, buffer.nbytes, buffer._storage)
        return buffer

    def allocate(self) -> None:
        """Allocate memory with arbitrary content, unless the buffer is allocated."""
        if not self.allocated:
            if self._label is not None:
                _memory.allow_reads(self._storage)
            self._storage.resize_(self.nbytes)
            self.allocated = True
            self._meter.change(self.kind, self.nbytes, self._storage)

    def free(self) -> None:
        """Free the memory, if the buffer is allocated."""
        if self.allocated:
            self._storage.resize_(0)
            if self._label is not None:
                text = _READ_WHEN_FREED.format(self._label.text)
                _memory.refuse_reads(self._storage, self.nbytes, text)
            self.allocated = False
            self._meter.change(self.kind, -self.nbytes, self._storage)

    def leave(self) -> None:
        """Stop counting the memory, without freeing it; drop the buffer and do not use it again.

        This is for a collective that never ended: the backend may still read or write the memory,
        and keeps it alive while it does.
        """
        if self.allocated:
            self.allocated = False
            self._meter.change(self.kind, -self.nbytes, self._storage)


def empty_cache() -> None:
    """Return unused memory of the accelerator's allocator to the device; do nothing on a CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        torch.get_device_module(accelerator).empty_cache()
