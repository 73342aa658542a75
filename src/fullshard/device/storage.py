"""Tensors that live long while their memory comes and goes, and a count of what they hold."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Kind(enum.StrEnum):
    """What a buffer is for; see the note in ``engine/bucket.py``."""

    UNSHARDED = "unsharded"
    SECONDARY = "secondary"
    GATHER_OUTPUT = "gather_output"
    ALL_GATHER_INPUT = "all_gather_input"
    REDUCE_INPUT = "reduce_input"
    FULL = "full"


class StorageMeter:
    """Counts the bytes that buffers hold now, the most they held at once, and those copied.

    ``copied_nbytes`` are the bytes written by copies and casts on the way to whole parameters and
    back, beyond what the collectives themselves do with their input and output.
    """

    def __init__(self) -> None:
        self.copied_nbytes = 0
        self.held_nbytes: Counter[Kind] = Counter()
        self.peak_nbytes: Counter[Kind] = Counter()

    def change(self, kind: Kind, nbytes: int) -> None:
        """Add ``nbytes`` (negative: freed) to what is held."""
        held = self.held_nbytes[kind] = self.held_nbytes[kind] + nbytes
        if held > self.peak_nbytes[kind]:
            self.peak_nbytes[kind] = held

    @contextmanager
    def holding(self, kind: Kind, nbytes: int) -> Iterator[None]:
        """Count ``nbytes`` of ordinary tensors that are held as long as the ``with`` block."""
        self.change(kind, nbytes)
        try:
            yield
        finally:
            self.change(kind, -nbytes)

    def copied(self, nbytes: int) -> None:
        """Note a copy that wrote ``nbytes``."""
        self.copied_nbytes += nbytes

    def reset_peak(self) -> None:
        """Start to look for a new peak."""
        self.peak_nbytes = Counter(self.held_nbytes)


class Buffer:
    """A 1-D tensor whose storage is allocated and freed again and again.

    ``tensor`` and views of it stay valid objects all the time, and valid memory only while
    ``allocated``: reading them in between kills the process. It starts allocated, because views
    can only be made of memory; make them, then ``free``. Memory belongs to the stream that is
    current when it is allocated: freed, it goes back there, whatever stream is current then, and
    what has to be over is what the next allocation on that stream comes after.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        kind: Kind,
        meter: StorageMeter,
    ) -> None:
        self.nbytes = numel * dtype.itemsize
        self.kind = kind
        self.allocated = True
        self._meter = meter
        meter.change(kind, self.nbytes)
        # An inference tensor could never be written again outside of inference mode.
        with torch.inference_mode(False):
            self.tensor: Tensor = torch.empty(numel, dtype=dtype, device=device)
            self._storage = self.tensor.untyped_storage()

    @classmethod
    def of(cls, tensor: Tensor, *, kind: Kind, meter: StorageMeter) -> Buffer:
        """The memory of a tensor made elsewhere."""
        buffer = cls(0, torch.uint8, tensor.device, kind=kind, meter=meter)
        buffer.tensor = tensor
        buffer._storage = tensor.untyped_storage()
        buffer.nbytes = buffer._storage.nbytes()
        meter.change(kind, buffer.nbytes)
        return buffer

    def allocate(self) -> None:
        """Give the tensor memory, with arbitrary content; nothing if it has some."""
        if not self.allocated:
            self._storage.resize_(self.nbytes)
            self.allocated = True
            self._meter.change(self.kind, self.nbytes)

    def free(self) -> None:
        """Take the memory away; nothing if there is none."""
        if self.allocated:
            self._storage.resize_(0)
            self.allocated = False
            self._meter.change(self.kind, -self.nbytes)
