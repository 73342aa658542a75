"""Measurements of a worker's memory, of its waiting time, and of all that it does."""

from __future__ import annotations

import json
import math
import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard

from .config import TrainConfig
from .rundir import RunDir


def peak_memory_nbytes(device: torch.device) -> int:
    """Return this worker's peak memory so far: of tensors on a GPU, of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def shard_nbytes(model: nn.Module) -> int:
    """Return the bytes of this worker's parameters between steps; gradients are as large."""
    return sum(
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes
        for parameter in model.parameters()
    )


def waited_s(model: nn.Module) -> float:
    """Return the total seconds that computation waited for communication; use differences."""
    return model.waited_s() if isinstance(model, fullshard.FSDPModule) else 0.0


def begin_wire_check(model: nn.Module) -> None:
    """Measure what the wire loses from now on."""
    if isinstance(model, fullshard.FSDPModule):
        model.set_wire_check(True)


def end_wire_check(model: nn.Module) -> tuple[float, float]:
    """Return what this worker lost of what it sent, parameters and gradients, and stop measuring.

    Each is the norm of the errors by that of the values, not a number if nothing was measured.
    """
    if not isinstance(model, fullshard.FSDPModule):
        return math.nan, math.nan
    model.set_wire_check(False)
    gathered, reduced = (math.nan if one is None else one for one in model.wire_errors())
    return gathered, reduced


def recording(config: TrainConfig, run: RunDir, model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context that records what the model does if asked for, beside the run's plan.

    It is the whole start: what is kept has a bound, and a failure may come late.
    """
    if not config.trace:
        return nullcontext()
    plan = json.loads(run.plan.read_text(encoding="utf-8")) if run.plan.exists() else None
    if plan is not None and not plan["has_times"]:
        del plan["step_s"]
    return fullshard.trace(model, run.trace, plan=plan)
