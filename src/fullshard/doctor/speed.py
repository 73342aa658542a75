"""How fast one rank computes: products of matrices, element-wise operations, small operations."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.device import DryLanes, Span
from fullshard.doctor.links import settle
from fullshard.plan.dry_run import on_meta
from fullshard.plan.hardware import Hardware
from fullshard.plan.ledger import Ledger

_REPETITIONS = 5
_LONGEST_S = 0.2  # of one product; a larger one is not tried
_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_NUMEL = {"cpu": 1 << 24}  # of the tensors that element-wise operations read
_LARGE_NUMEL = 1 << 26
_STEPS = 30


class Speed(NamedTuple):
    """The speeds that one rank reaches while all others do the same."""

    flops: Mapping[str, float]
    """FLOP/s of products of large matrices, by dtype."""
    memory_bandwidth: float
    """Bytes a second that adding two tensors reads and writes."""
    op_s: float
    """Seconds of the host for each small operation of a forward and backward."""
    tiny_step_s: float | None = None
    """Seconds of a step of tiny units (``tiny``); None: not measured."""


def speed_here(device: torch.device) -> Speed:
    """Measure this rank; takes a few seconds."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    if device.type != "cpu":
        dtypes.append(torch.float16)
    return Speed(
        {str(dtype).removeprefix("torch."): _flops(device, dtype) for dtype in dtypes},
        _memory_bandwidth(device),
        _op_s(device),
    )


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best rate over growing sizes, up to the size that would take too long."""
    best = 0.0
    for size in _SIZES:
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        taken_s = _median_s(partial(torch.mm, matrix, matrix), device)
        best = max(best, 2 * size**3 / taken_s)
        if 8 * taken_s > _LONGEST_S:
            break
    return best


def _memory_bandwidth(device: torch.device) -> float:
    one = torch.ones(_NUMEL.get(device.type, _LARGE_NUMEL), device=device)
    return 3 * one.nbytes / _median_s(partial(torch.add, one, one), device)


def _op_s(device: torch.device) -> float:
    """Return the host's time for small layers, divided by the operations a plan counts for them.

    On a device other than the CPU the host runs ahead, so nothing waits for the device.
    """
    layers = [(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(4)]
    model = nn.Sequential(*(layer for block in layers for layer in block)).to(device)
    batch = torch.ones(4, 16, device=device)
    num_ops = count_operations(model, batch)
    taken = []
    for _ in range(_STEPS):
        settle(device)
        before_s = time.perf_counter()
        _step(model, batch)
        taken.append(time.perf_counter() - before_s)
    return statistics.median(taken) / num_ops


def count_operations(model: nn.Module, batch: Tensor) -> int:
    """Return the operations of forward and backward for which a plan lets the host take time."""
    spans: list[Span] = []
    lanes = DryLanes(duration_s=lambda exchange: 0.0, note=spans.append)
    hardware = Hardware("infinitely fast", 0, {"float32": math.inf}, math.inf)
    with Ledger(hardware, lanes):
        _step(on_meta(model), batch.to("meta"))
    return len(spans)


def _step(model: nn.Module, batch: Tensor) -> None:
    model.zero_grad()
    _torch.run_backward(model(batch).sum())


def _median_s(run: Callable[[], object], device: torch.device) -> float:
    taken = []
    for _ in range(1 + _REPETITIONS):
        settle(device)
        before_s = time.perf_counter()
        run()
        settle(device)
        taken.append(time.perf_counter() - before_s)
    return statistics.median(taken[1:])  # the first one warms up
