"""What a worker's memory holds, and what it waits for."""

from __future__ import annotations

import resource
import sys

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard


def peak_memory_nbytes(device: torch.device) -> int:
    """The most that this worker has needed so far: tensors on a GPU, the whole process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def shard_nbytes(model: nn.Module) -> int:
    """The parameters that this worker keeps between steps, as large as their gradients."""
    return sum(
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes
        for parameter in model.parameters()
    )


def waited_s(model: nn.Module) -> float:
    """Seconds that computation has waited for communication so far; take a difference."""
    return model.waited_s() if isinstance(model, fullshard.FSDPModule) else 0.0
