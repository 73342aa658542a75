"""List the names in PyTorch that we replace."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

from fullshard import comm, engine, flat, frontend, wrap
from fullshard.compat import flat_states, states
from fullshard.optim import ShardedGradScaler


def _named(room: ModuleType, names: Iterable[str]) -> dict[str, object]:
    return {name: getattr(room, name) for name in names}


_FSDP1 = _named(flat, flat.__all__)
_CALLS = _named(
    frontend,
    "FSDPModule GradientReductionHandle UnshardHandle fully_shard register_fsdp_forward_method"
    " share_comm_ctx".split(),
)
_POLICIES = _named(engine, ("CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"))
_MESH_DIMS = _named(frontend, ("DataParallelMeshDims",))
_STATE = {"_get_module_fsdp_state": states.module_state}
_STATE1 = {"_get_module_fsdp_state": flat_states.module_state}

OURS: dict[str, dict[str, object]] = {
    "torch.distributed.fsdp": _FSDP1 | _POLICIES | _MESH_DIMS | _CALLS,
    "torch.distributed.fsdp.fully_sharded_data_parallel": _FSDP1,
    # Called by torch.distributed.checkpoint.state_dict, and by all that looks for wrappers.
    "torch.distributed.fsdp._common_utils": {
        **_STATE1,
        "_get_module_fsdp_state_if_fully_sharded_module": flat_states.state_if_sharded,
    },
    "torch.distributed.fsdp._traversal_utils": {**_STATE1},
    "torch.distributed.fsdp._debug_utils": {**_STATE1},
    "torch.distributed.fsdp._runtime_utils": {**_STATE1, "_lazy_init": flat_states.lazy_init},
    "torch.distributed.fsdp._unshard_param_utils": {
        **_STATE1,
        "_unshard_params": flat_states.unshard_params,
        "_unshard_params_for_summon": flat_states.unshard_params_for_summon,
    },
    "torch.distributed.fsdp.sharded_grad_scaler": {"ShardedGradScaler": ShardedGradScaler},
    "torch.distributed.fsdp.wrap": {
        **_named(wrap, wrap.__all__),
        "CustomPolicy": flat_states.CustomPolicy,
    },
    "torch.distributed.fsdp._fully_shard._fsdp_api": {
        **_named(comm, ("AllGather", "Comm", "ReduceScatter")),
        **_POLICIES,
        **_MESH_DIMS,
    },
    "torch.distributed.fsdp._fully_shard._fsdp_common": {
        **_MESH_DIMS,
        "ShardPlacementResult": frontend.ShardPlacementResult,
    },
    # Called by torch.distributed.checkpoint.state_dict for full state dicts.
    "torch.distributed._state_dict_utils": {"_distribute_tensors": states.distribute_tensors},
    # Called by Dynamo; PyTorch reads the variable behind the function itself.
    "torch.distributed.fsdp._fully_shard._fully_shard": {
        "get_cls_to_fsdp_cls": states.get_cls_to_fsdp_cls,
    },
}
"""Our objects while PyTorch is patched: PyTorch module -> name in the module -> our object.

In other modules, names of replaced objects change too, except where ``keeps_torchs`` is true. Mesh
infos (``FSDPMeshInfo`` and similar) stay PyTorch's: they say what a mesh is for, and we read them.
"""

SHOWN: dict[str, dict[str, object]] = {
    "torch.distributed.fsdp._fully_shard._fully_shard": {**_CALLS, **_STATE},
    "torch.distributed.fsdp._fully_shard._fsdp_state": {**_STATE},
    "torch.distributed.fsdp._fully_shard._fsdp_init": {
        **_STATE,
        "_get_managed_modules": states.managed_modules,
    },
}
"""The names that programs find in files of PyTorch's implementation, while PyTorch is
patched: the same table as ``OURS``, but the functions in those files keep using PyTorch's."""

BUILT_ON_SHOWN = ("torch.distributed._composable.replicate_with_fsdp",)
"""Modules of PyTorch's that import names of ``SHOWN`` for their own use. ``patch_torch`` imports
these modules before it shows ours."""

# Modules that implement PyTorch's FSDP or depend on its internals.
_IMPLEMENTATION = (
    "torch.distributed.fsdp._",
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed._tools.fsdp2_mem_tracker",
)
_FACE = "torch.distributed.fsdp._fully_shard"


ATTRIBUTES: tuple[tuple[object, str, object], ...] = (
    (frontend.fully_shard, "state", states.state_of),
    (frontend.FSDPModule, "_get_fsdp_state", states.own_state),
    (engine.MixedPrecisionPolicy, "_resolve_for_param", states.policy_for_param),
    *(
        (flat.FullyShardedDataParallel, name, property(value))
        for name, value in flat_states.WRAPPER_ATTRIBUTES.items()
    ),
)
"""Our object, name and value of each attribute that the object has while PyTorch is patched."""


def keeps_torchs(module: str) -> bool:
    """Return whether ``module`` keeps PyTorch's names, except for names that ``OURS`` lists.

    Modules that PyTorch sharded before the patch can thus continue to train.
    """
    return is_ours(module) or (module.startswith(_IMPLEMENTATION) and module != _FACE)


def is_ours(module: str) -> bool:
    """Return whether ``module`` is the name of a module of fullshard."""
    return module == "fullshard" or module.startswith("fullshard.")
