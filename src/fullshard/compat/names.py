"""List the names in PyTorch that we replace, one line for each name."""

from __future__ import annotations

from fullshard import flat, wrap
from fullshard.comm import AllGather, Comm, ReduceScatter
from fullshard.compat.handles import CustomPolicy, flat_state_of, get_cls_to_fsdp_cls
from fullshard.engine import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.frontend import (
    DataParallelMeshDims,
    FSDPModule,
    GradientReductionHandle,
    ShardPlacementResult,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fullshard.optim import ShardedGradScaler

_FSDP1 = {name: getattr(flat, name) for name in flat.__all__}
_NOT_IN_API = ("FullyShardedDataParallel", "OptimStateKeyType")

OURS: dict[str, dict[str, object]] = {
    "torch.distributed.fsdp": {
        **_FSDP1,
        "CPUOffloadPolicy": CPUOffloadPolicy,
        "DataParallelMeshDims": DataParallelMeshDims,
        "FSDPModule": FSDPModule,
        "GradientReductionHandle": GradientReductionHandle,
        "MixedPrecisionPolicy": MixedPrecisionPolicy,
        "OffloadPolicy": OffloadPolicy,
        "UnshardHandle": UnshardHandle,
        "fully_shard": fully_shard,
        "register_fsdp_forward_method": register_fsdp_forward_method,
        "share_comm_ctx": share_comm_ctx,
    },
    "torch.distributed.fsdp.api": {n: _FSDP1[n] for n in _FSDP1 if n not in _NOT_IN_API},
    "torch.distributed.fsdp.fully_sharded_data_parallel": _FSDP1,
    # Called by torch.distributed.checkpoint.state_dict.
    "torch.distributed.fsdp._common_utils": {
        "_get_module_fsdp_state_if_fully_sharded_module": flat_state_of,
    },
    "torch.distributed.fsdp.sharded_grad_scaler": {"ShardedGradScaler": ShardedGradScaler},
    "torch.distributed.fsdp.wrap": {
        **{name: getattr(wrap, name) for name in wrap.__all__},
        "CustomPolicy": CustomPolicy,
    },
    "torch.distributed.fsdp._fully_shard._fsdp_api": {
        "AllGather": AllGather,
        "CPUOffloadPolicy": CPUOffloadPolicy,
        "Comm": Comm,
        "DataParallelMeshDims": DataParallelMeshDims,
        "MixedPrecisionPolicy": MixedPrecisionPolicy,
        "OffloadPolicy": OffloadPolicy,
        "ReduceScatter": ReduceScatter,
    },
    "torch.distributed.fsdp._fully_shard._fsdp_common": {
        "DataParallelMeshDims": DataParallelMeshDims,
        "ShardPlacementResult": ShardPlacementResult,
    },
    # Called by Dynamo; PyTorch reads the variable behind the function itself.
    "torch.distributed.fsdp._fully_shard._fully_shard": {
        "get_cls_to_fsdp_cls": get_cls_to_fsdp_cls,
    },
}
"""Our objects while PyTorch is patched: PyTorch module -> name in the module -> our object.

In other modules, names of replaced objects change too, except where ``keeps_torchs`` is true. Mesh
infos (``FSDPMeshInfo`` and similar) stay PyTorch's: they say what a mesh is for, and we read them.
"""

_ENTRY = {
    "FSDPModule": FSDPModule,
    "GradientReductionHandle": GradientReductionHandle,
    "UnshardHandle": UnshardHandle,
    "fully_shard": fully_shard,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
}

SHOWN: dict[str, dict[str, object]] = {
    "torch.distributed.fsdp._fully_shard._fully_shard": _ENTRY,
}
"""What programs that import from files of PyTorch's implementation find there, while PyTorch is
patched: the same table as ``OURS``, but the functions in those files go on using PyTorch's."""

BUILT_ON_SHOWN = ("torch.distributed._composable.replicate_with_fsdp",)
"""Modules of PyTorch's that import names of ``SHOWN`` for their own use. They are imported before
anything is shown."""

# Modules that implement PyTorch's FSDP or depend on its internals.
_IMPLEMENTATION = (
    "torch.distributed.fsdp._",
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed._tools.fsdp2_mem_tracker",
)
_FACE = "torch.distributed.fsdp._fully_shard"


def keeps_torchs(module: str) -> bool:
    """Return whether ``module`` keeps PyTorch's names, except for names that ``OURS`` lists.

    Modules that PyTorch sharded before the patch can thus continue to train.
    """
    return is_ours(module) or (module.startswith(_IMPLEMENTATION) and module != _FACE)


def is_ours(module: str) -> bool:
    """Return whether ``module`` is the name of a module of fullshard."""
    return module == "fullshard" or module.startswith("fullshard.")
