"""The states and handles of our ``FullyShardedDataParallel``, as PyTorch's private files show them.

A wrapper is its own state, in PyTorch too. All attribute names are PyTorch's; docs/compat.md lists
them, and alternatives to the names that raise. PyTorch's private files of FSDP1 are imported late,
when a program reads a name that needs them, so that FSDP2 can be patched without these files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NoReturn

from torch import nn

from fullshard import wrap
from fullshard.compat.states import View, originals, state_in_machine, torch_file, torch_name
from fullshard.errors import UnsupportedError
from fullshard.flat import FullyShardedDataParallel
from fullshard.schedule import Hold
from fullshard.schedule.state import IN_USE


def module_state(module: nn.Module) -> Any:
    """Return the FSDP1 state of ``module``, for our wrapper itself; None if there is no state."""
    ours = isinstance(module, FullyShardedDataParallel)
    return module if ours else originals[module_state](module)


def state_if_sharded(module: nn.Module) -> Any:
    """Return the same; PyTorch's function also checks that the state is that of ``module``."""
    ours = isinstance(module, FullyShardedDataParallel)
    return module if ours else originals[state_if_sharded](module)


def lazy_init(state: Any, root_module: nn.Module) -> Any:
    """Do nothing for our wrappers, because they initialize at construction."""
    ours = isinstance(state, FullyShardedDataParallel)
    return state if ours else originals[lazy_init](state, root_module)


def unshard_params(module: nn.Module, recurse: bool, *options: Any, **named: Any) -> Any:
    """Lend the full parameters below ``module``, by our ``summon_full_params`` if they are ours."""
    inside = module.modules() if recurse else [module]
    ours = any(isinstance(one, FullyShardedDataParallel) for one in inside)
    lend = FullyShardedDataParallel.summon_full_params if ours else originals[unshard_params]
    return lend(module, recurse, *options, **named)


def unshard_params_for_summon(module: nn.Module, state: Any, *options: Any, **named: Any) -> Any:
    """Lend the full parameters of one wrapper."""
    if isinstance(state, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(state, False, *options, **named)
    return originals[unshard_params_for_summon](module, state, *options, **named)


def _use_orig_params(fsdp: FullyShardedDataParallel) -> bool:
    return bool(getattr(fsdp.module, "_fsdp_use_orig_params", False))


def _flat_param(fsdp: FullyShardedDataParallel) -> nn.Parameter:
    front = fsdp._unit.buckets[0].front
    if front is None:
        raise UnsupportedError(
            "FlatParamHandle.flat_param of a wrapper with use_orig_params=True: there is none, "
            "its parameters are themselves over this rank's elements; use parameters()"
        )
    return front.param


def _training_state(fsdp: FullyShardedDataParallel) -> Any:
    states = torch_name("_common_utils.TrainingState")
    if fsdp._unit.is_lent:
        return states.SUMMON_FULL_PARAMS
    in_use = state_in_machine(fsdp._unit).holds & IN_USE
    return states.FORWARD_BACKWARD if in_use else states.IDLE


def _handle_training_state(fsdp: FullyShardedDataParallel) -> Any:
    states = torch_name("_common_utils.HandleTrainingState")
    if fsdp._unit.is_lent:
        return states.SUMMON_FULL_PARAMS
    holds = state_in_machine(fsdp._unit).holds & IN_USE
    if not holds:
        return states.IDLE
    return states.FORWARD if holds == Hold.FORWARD else states.BACKWARD_PRE


def _handle_strategy(fsdp: FullyShardedDataParallel) -> Any:
    return torch_name("_flat_param.HandleShardingStrategy")[fsdp.sharding_strategy.name]


Shown = Mapping[str, Callable[[FullyShardedDataParallel], object]]


class Handle(View):
    """The ``FlatParamHandle`` of a wrapper that has parameters of its own."""

    stands_for = "_flat_param.FlatParamHandle"
    shown: ClassVar[Shown] = {
        "flat_param": _flat_param,
        "_fully_sharded_module": lambda fsdp: fsdp.module,
        "_training_state": _handle_training_state,
        "_use_orig_params": _use_orig_params,
        "_offload_params": lambda fsdp: fsdp.cpu_offload.offload_params,
        "_sharding_strategy": _handle_strategy,
        "uses_sharded_strategy": lambda fsdp: fsdp.sharding_strategy.name != "NO_SHARD",
        "process_group": lambda fsdp: fsdp.process_group,
        "rank": lambda fsdp: fsdp.rank,
        "world_size": lambda fsdp: fsdp.world_size,
        "device": lambda fsdp: fsdp.compute_device,
    }
    instead: ClassVar[Mapping[str, str]] = {
        "flat_param_to": "the wrapper's .to() or .cpu()",
        "unshard": "FullyShardedDataParallel.summon_full_params",
        "unshard_grad": "summon_full_params with with_grads=True",
        "reshard": "the end of the with block of summon_full_params",
        "to_cpu": "summon_full_params with offload_to_cpu=True",
        "shard": "nothing: a wrapper is sharded from the beginning",
        "prepare_gradient_for_backward": "no_sync()",
    }


def _handle(fsdp: FullyShardedDataParallel) -> Handle | None:
    """Return the handle of a wrapper; None if it has no parameters of its own."""
    return Handle(fsdp) if fsdp._unit.buckets else None


def _wrappers_of_root(fsdp: FullyShardedDataParallel) -> list[FullyShardedDataParallel]:
    """Return the wrappers of a root, the root first; [] for inner wrappers, as in PyTorch."""
    return fsdp.fsdp_modules(fsdp) if fsdp._is_root else []


def _refuse(name: str, instead: str, fsdp: FullyShardedDataParallel) -> NoReturn:
    raise UnsupportedError(
        f"FullyShardedDataParallel.{name} of fullshard: there is none; use {instead}"
    )


WRAPPER_INSTEAD = {
    "_device_handle": "summon_full_params",
    "_exec_order_data": "backward_prefetch",
    "_comm_hook": "register_comm_hook",
}
"""Attributes that PyTorch's wrappers have and ours refuse, because None would be wrong."""

WRAPPER_ATTRIBUTES: Shown = {
    "_all_fsdp_states": _wrappers_of_root,
    "_all_handles": lambda fsdp: [Handle(w) for w in _wrappers_of_root(fsdp) if w._unit.buckets],
    "_device_mesh": lambda fsdp: fsdp._given.mesh.mesh,
    "_fully_sharded_module_to_handle": lambda fsdp: {fsdp.module: _handle(fsdp)},
    "_handle": _handle,
    "_has_params": lambda fsdp: bool(fsdp._unit.buckets),
    "_use_orig_params": _use_orig_params,
    "params": lambda fsdp: [p for bucket in fsdp._unit.buckets for p in bucket.stepped_params],
    "training_state": _training_state,
    **{name: partial(_refuse, name, instead) for name, instead in WRAPPER_INSTEAD.items()},
}
"""Properties that our wrappers have while PyTorch is patched."""

_TheirPolicy: Any = getattr(torch_file("wrap"), "_Policy", object)


class CustomPolicy(wrap.CustomPolicy, _TheirPolicy):  # type: ignore[misc]
    """A ``CustomPolicy`` that PyTorch's ``apply_activation_checkpointing`` accepts too.

    PyTorch accepts only callables, such as a ``ModuleWrapPolicy``, and instances of ``_Policy``.
    """

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: wrap.policies.Options,
    ) -> dict[nn.Module, wrap.policies.Options]:
        chosen = self.choose(root_module, ignored_modules)
        return {module: {**root_kwargs, **options} for module, options in chosen.items()}
