"""Fully sharded data parallelism: train PyTorch models that are too big for one device."""

from __future__ import annotations

import sys

from fullshard import checkpoint, errors, optim, wrap
from fullshard._version import __version__ as __version__
from fullshard.checkpoint.weights import stream_params
from fullshard.comm import AllGather, Comm, ReduceScatter
from fullshard.engine import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    WireErrors,
    WirePolicy,
)
from fullshard.flat import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fullshard.frontend import (
    Choice,
    ChosenUnit,
    ChosenUnits,
    DataParallelMeshDims,
    FSDPModule,
    GradientReductionHandle,
    ShardPlacementResult,
    UnshardHandle,
    checkpoint_blocks,
    fully_shard,
    iter_full_params,
    register_fsdp_forward_method,
    shard_blocks,
    share_comm_ctx,
    unshard_params,
)
from fullshard.layout import ParamSpec, PerParameter, Ragged
from fullshard.plan import plan
from fullshard.recover import Life, Microbatches, Restart, resilient
from fullshard.tensors import RaggedTensor
from fullshard.trace import Trace, trace

__all__ = [
    "AllGather",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "Choice",
    "ChosenUnit",
    "ChosenUnits",
    "Comm",
    "DataParallelMeshDims",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "Life",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "Microbatches",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ParamSpec",
    "PerParameter",
    "Ragged",
    "RaggedTensor",
    "ReduceScatter",
    "Restart",
    "ShardPlacementResult",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "Trace",
    "UnshardHandle",
    "WireErrors",
    "WirePolicy",
    "checkpoint",
    "checkpoint_blocks",
    "errors",
    "fully_shard",
    "iter_full_params",
    "optim",
    "plan",
    "register_fsdp_forward_method",
    "resilient",
    "shard_blocks",
    "share_comm_ctx",
    "stream_params",
    "trace",
    "unshard_params",
    "wrap",
]

for _function in (plan, trace):  # so that `import fullshard.plan as p` gives `p.PRESETS`, too
    _module = vars(sys.modules[f"fullshard.{_function.__name__}"])
    vars(_function).update({name: one for name, one in _module.items() if name[0] != "_"})
