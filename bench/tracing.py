"""Peak and held memory, from PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.profiler import profile, record_function

_MARK = "bench::mark"


@dataclass
class MemoryTrace:
    """Bytes that the CPU allocator gave out since the block began; known when it has ended."""

    peak_nbytes: int = 0
    held_nbytes: int = 0

    def mark(self) -> None:
        """Look for the peak from here on."""
        with record_function(_MARK):
            pass


@contextmanager
def memory(*, below: int | None = None) -> Iterator[MemoryTrace]:
    """Watch the CPU allocator in the block.

    If given, only allocations of fewer than ``below`` bytes count: memory that processes share is
    mapped in larger pieces, which the profiler takes for allocations.
    """
    trace = MemoryTrace()
    # The one of torch.profiler also makes a Python object of each event, which takes far longer.
    with profile(profile_memory=True) as prof:
        yield trace
    events = prof.kineto_results.events()
    marked_ns = max((e.start_ns() for e in events if e.name() == _MARK), default=0)
    held = 0
    changes = (e for e in events if e.name() == "[memory]" and e.device_type() == _CPU)
    for event in sorted(changes, key=lambda e: e.start_ns()):
        if below is not None and abs(event.nbytes()) >= below:
            continue
        held += event.nbytes()
        if event.start_ns() >= marked_ns:
            trace.peak_nbytes = max(trace.peak_nbytes, held)
    trace.held_nbytes = held


_CPU = torch.autograd.DeviceType.CPU
