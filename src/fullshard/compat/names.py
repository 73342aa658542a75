"""List the names in PyTorch that we replace, one line for each name."""

from __future__ import annotations

from typing import NamedTuple

from fullshard import flat, wrap
from fullshard.comm import AllGather, Comm, ReduceScatter
from fullshard.compat import flat_states, states
from fullshard.compat.handles import (
    CustomPolicy,
    distribute_tensors,
    get_cls_to_fsdp_cls,
    policy_for_param,
)
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

_STATE: dict[str, object] = {"_get_module_fsdp_state": flat_states.module_state}

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
    # Called by torch.distributed.checkpoint.state_dict, and by all that looks for wrappers.
    "torch.distributed.fsdp._common_utils": {
        "_get_module_fsdp_state": flat_states.module_state,
        "_get_module_fsdp_state_if_fully_sharded_module": flat_states.state_if_sharded,
    },
    "torch.distributed.fsdp._traversal_utils": _STATE,
    "torch.distributed.fsdp._debug_utils": _STATE,
    "torch.distributed.fsdp._runtime_utils": {**_STATE, "_lazy_init": flat_states.lazy_init},
    "torch.distributed.fsdp._unshard_param_utils": {
        **_STATE,
        "_unshard_params": flat_states.unshard_params,
        "_unshard_params_for_summon": flat_states.unshard_params_for_summon,
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
    # Called by torch.distributed.checkpoint.state_dict for whole state dicts.
    "torch.distributed._state_dict_utils": {"_distribute_tensors": distribute_tensors},
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

_STATE2: dict[str, object] = {"_get_module_fsdp_state": states.module_state}

SHOWN: dict[str, dict[str, object]] = {
    "torch.distributed.fsdp._fully_shard._fully_shard": {**_ENTRY, **_STATE2},
    "torch.distributed.fsdp._fully_shard._fsdp_state": _STATE2,
    "torch.distributed.fsdp._fully_shard._fsdp_init": {
        **_STATE2,
        "_get_managed_modules": states.managed_modules,
    },
}
"""The names that programs find in files of PyTorch's implementation, while PyTorch is
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


class Attribute(NamedTuple):
    """An attribute that an object of ours has while PyTorch is patched."""

    of: object
    name: str
    value: object


ATTRIBUTES = (
    Attribute(fully_shard, "state", states.state_of),
    Attribute(FSDPModule, "_get_fsdp_state", states.own_state),
    Attribute(MixedPrecisionPolicy, "_resolve_for_param", policy_for_param),
    *(
        Attribute(flat.FullyShardedDataParallel, name, property(value))
        for name, value in flat_states.WRAPPER_ATTRIBUTES.items()
    ),
)


def keeps_torchs(module: str) -> bool:
    """Return whether ``module`` keeps PyTorch's names, except for names that ``OURS`` lists.

    Modules that PyTorch sharded before the patch can thus continue to train.
    """
    return is_ours(module) or (module.startswith(_IMPLEMENTATION) and module != _FACE)


def is_ours(module: str) -> bool:
    """Return whether ``module`` is the name of a module of fullshard."""
    return module == "fullshard" or module.startswith("fullshard.")
