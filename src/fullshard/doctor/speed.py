"""The speed of one rank: products of matrices and element-wise operations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

_REPETITIONS = 5
_LONGEST_S = 0.2  # a matrix product expected to take longer is not tried
_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_NUMEL = {"cpu": 1 << 24}  # elements of each tensor that an addition reads
_LARGE_NUMEL = 1 << 26  # the same on other devices


class Speed(NamedTuple):
    """The speeds of one rank, measured on all ranks at the same time."""

    flops: Mapping[str, float]
    """FLOP/s of products of large matrices, by dtype."""
    memory_bandwidth: float
    """Bytes per second read and written by an addition of two tensors."""
    op_s: float | None = None
    """Seconds of the host per small operation of forward and backward; None: not measured."""
    tiny_step_s: float | None = None
    """Seconds of forward and backward of a model of tiny units; None: not measured."""


def speed_here(device: torch.device) -> Speed:
    """Measure this rank, except for the times that ``plan.time_host`` adds; takes seconds."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    if device.type != "cpu":
        dtypes.append(torch.float16)
    return Speed(
        {str(dtype).removeprefix("torch."): _flops(device, dtype) for dtype in dtypes},
        _memory_bandwidth(device),
    )


def median_s(
    run: Callable[[], object],
    device: torch.device,
    *,
    repetitions: int,
    warm_up: int = 1,
    prepare: Callable[[], object] = lambda: None,
    waits: bool = True,
) -> float:
    """Return the median seconds of ``run``, over ``repetitions`` after ``warm_up`` untimed runs.

    ``prepare`` is called before each run, untimed. Unless ``waits``, the time ends when the host
    has issued the work, not when the device has done it.
    """
    taken = []
    for _ in range(warm_up + repetitions):
        prepare()
        _synchronize(device)
        before_s = time.perf_counter()
        run()
        if waits:
            _synchronize(device)
        taken.append(time.perf_counter() - before_s)
    return statistics.median(taken[warm_up:])


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the highest FLOP/s over growing sizes, up to ``_LONGEST_S`` for one product."""
    best = 0.0
    for size in _SIZES:
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        product = partial(torch.mm, matrix, matrix)
        taken_s = median_s(product, device, repetitions=_REPETITIONS)
        best = max(best, 2 * size**3 / taken_s)
        if 8 * taken_s > _LONGEST_S:
            break
    return best


def _memory_bandwidth(device: torch.device) -> float:
    one = torch.ones(_NUMEL.get(device.type, _LARGE_NUMEL), device=device)
    return 3 * one.nbytes / median_s(partial(torch.add, one, one), device, repetitions=_REPETITIONS)
