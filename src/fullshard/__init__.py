"""Fully sharded data parallelism: train PyTorch models that are too big for one device."""

from __future__ import annotations

from fullshard import errors, optim
from fullshard.engine import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.frontend import (
    ChosenUnit,
    ChosenUnits,
    DataParallelMeshDims,
    FSDPModule,
    ShardPlacementResult,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    shard_blocks,
)
from fullshard.layout import ParamSpec, PerParameter, Ragged
from fullshard.tensors import RaggedTensor

__all__ = [
    "CPUOffloadPolicy",
    "ChosenUnit",
    "ChosenUnits",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParamSpec",
    "PerParameter",
    "Ragged",
    "RaggedTensor",
    "ShardPlacementResult",
    "UnshardHandle",
    "errors",
    "fully_shard",
    "optim",
    "register_fsdp_forward_method",
    "shard_blocks",
]

__version__ = "0.1.0"
