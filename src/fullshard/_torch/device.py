"""Devices: events, captures of graphs, and copies of many tensors in one kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from fullshard._torch.names import Private

private = Private(__name__, "reductions on CUDA")


def mark(device_type: str) -> Any:
    """Return an event behind what was issued on the current stream; None in a graph's capture."""
    module = torch.get_device_module(device_type)
    if is_capturing(module):
        return None
    event = module.Event()
    event.record()
    return event


def is_capturing(module: Any) -> bool:
    """Return whether a graph is captured on the current stream of an accelerator's ``module``."""
    asks: Callable[[], bool] = getattr(module, "is_current_stream_capturing", bool)
    return asks()


@contextmanager
def beside_captures() -> Iterator[bool]:
    """Allow event queries in this thread while another thread captures a CUDA graph.

    A query by a thread in the default capture mode invalidates captures of other threads. Yields
    False if CUDA is initialized and the mode cannot be changed; do not query events then.
    """
    exchange = _exchange_of_capture_modes()
    if exchange is None:
        yield not torch.cuda.is_initialized()  # before that there are no events, nor captures
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield True
    finally:
        exchange(ctypes.byref(mode))  # the one before


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@cache
def _exchange_of_capture_modes() -> Callable[..., Any] | None:
    """Return the driver's function that exchanges the calling thread's mode; PyTorch has none."""
    cuda, hip = ("libcuda.so.1", "cuThread"), ("libamdhip64.so", "hipThread")
    library, prefix = cuda if torch.version.hip is None else hip
    with suppress(OSError, AttributeError):
        exchange = getattr(ctypes.CDLL(library), f"{prefix}ExchangeStreamCaptureMode")
        return cast("Callable[..., Any]", exchange)
    return None


def fuses_copies(device: torch.device) -> bool:
    """Return whether ``chunk_cat`` and ``split_copy`` are one kernel each on ``device``."""
    return device.type == "cuda"


def chunk_cat(sources: Sequence[Tensor], out: Tensor) -> None:
    """Cut dim 0 of each source into ``len(out)`` chunks; copy chunk r to row r of ``out`` (2-D).

    The number of rows per chunk is rounded up; zeros fill chunks with fewer rows. The sources
    must be contiguous, because the kernel reads contiguous memory in any case.
    """
    is_mixed = len({source.dtype for source in sources}) > 1
    chunk_cat = torch.ops.fsdp.chunk_cat_mixed_dtype if is_mixed else torch._chunk_cat
    chunk_cat(list(sources), 0, len(out), out=out)


def split_copy(source: Tensor, places: Sequence[Tensor]) -> None:
    """Copy adjacent column blocks of ``source`` (2-D) to ``places``; all tensors are contiguous."""
    torch.split_with_sizes_copy(source, [p.shape[1] for p in places], dim=1, out=list(places))


def casts_in_chunk_cat(sources: set[torch.dtype], out: torch.dtype) -> bool:
    """Return whether ``chunk_cat`` into dtype ``out`` is one kernel per dtype in ``sources``."""
    if len(sources) > 1 and not hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype"):  # new in 2.15
        return False
    return sources == {out} or (sources <= {torch.bfloat16, out} and out is torch.float32)


private.attributes("torch", "_chunk_cat")
