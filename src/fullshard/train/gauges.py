"""Measurements of a worker's memory and of its waiting time."""

from __future__ import annotations

import resource
import sys

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard


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
