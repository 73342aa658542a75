"""What users choose for a call of ``fully_shard``; frozen values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of computation and communication; sharded parameters and gradients keep theirs.

    The fields are those of ``torch.distributed.fsdp.MixedPrecisionPolicy``, whose instances are
    accepted too.
    """

    param_dtype: torch.dtype | None = None
    """Of the all-gather and of the unsharded parameters (floating-point ones only); None: their
    own."""
    reduce_dtype: torch.dtype | None = None
    """Of the reduction of gradients; None: the dtype of the unsharded parameters."""
    output_dtype: torch.dtype | None = None
    """Floating-point outputs of the module's forward are cast to it; None: no cast."""
    cast_forward_inputs: bool = True
    """Whether floating-point inputs of the module's forward are cast to ``param_dtype``."""


@dataclass(frozen=True)
class OffloadPolicy:
    """Keep everything on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards on the CPU. Not built yet."""

    pin_memory: bool = True
