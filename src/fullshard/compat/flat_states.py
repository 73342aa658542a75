"""The states and handles of our ``FullyShardedDataParallel``, as PyTorch's private files show them.

A wrapper is its own state, in PyTorch too. All attribute names are PyTorch's; docs/compat.md
lists them, and what to use for others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import _common_utils as torch_common
from torch.distributed.fsdp import _flat_param as torch_flat_param
from torch.distributed.fsdp import _runtime_utils as torch_runtime
from torch.distributed.fsdp import _unshard_param_utils as torch_unshard

from fullshard.compat.states import state_in_machine
from fullshard.compat.views import View
from fullshard.errors import UnsupportedError
from fullshard.flat import FullyShardedDataParallel
from fullshard.frontend.flat_param import FlatParameter
from fullshard.schedule import Hold
from fullshard.schedule.state import IN_USE

_theirs = torch_common._get_module_fsdp_state
_theirs_if_sharded = torch_common._get_module_fsdp_state_if_fully_sharded_module
_their_lazy_init = torch_runtime._lazy_init
_their_unshard = torch_unshard._unshard_params
_their_summon = torch_unshard._unshard_params_for_summon


def module_state(module: nn.Module) -> Any:
    """Return the FSDP1 state of ``module``, which our wrapper is itself; None if it has none."""
    return module if isinstance(module, FullyShardedDataParallel) else _theirs(module)


def state_if_sharded(module: nn.Module) -> Any:
    """Return the same; PyTorch's function also asks whether the state is that of ``module``."""
    ours = isinstance(module, FullyShardedDataParallel)
    return module if ours else _theirs_if_sharded(module)


def lazy_init(state: Any, root_module: nn.Module) -> Any:
    """Do nothing for our wrappers, because nothing is initialised late."""
    ours = isinstance(state, FullyShardedDataParallel)
    return state if ours else _their_lazy_init(state, root_module)


def unshard_params(
    module: nn.Module,
    recurse: bool,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> AbstractContextManager[None]:
    """Lend the full parameters below ``module``, by our ``summon_full_params`` if they are ours."""
    options = (recurse, writeback, rank0_only, offload_to_cpu, with_grads)
    inside = module.modules() if recurse else [module]
    if any(isinstance(one, FullyShardedDataParallel) for one in inside):
        return FullyShardedDataParallel.summon_full_params(module, *options)
    return cast(AbstractContextManager[None], _their_unshard(module, *options))


def unshard_params_for_summon(
    module: nn.Module,
    state: Any,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> AbstractContextManager[None]:
    """Lend the full parameters of one wrapper."""
    options = (writeback, rank0_only, offload_to_cpu, with_grads)
    if isinstance(state, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(state, False, *options)
    return cast(AbstractContextManager[None], _their_summon(module, state, *options))


class Handle(View):
    """The handle of a wrapper with parameters of its own (``FlatParamHandle``)."""

    stands_for = torch_flat_param.FlatParamHandle
    instead: ClassVar[dict[str, str]] = {
        "flat_param_to": "the wrapper's .to() or .cpu()",
        "unshard": "FullyShardedDataParallel.summon_full_params",
        "unshard_grad": "summon_full_params with with_grads=True",
        "reshard": "the end of the with block of summon_full_params",
        "to_cpu": "summon_full_params with offload_to_cpu=True",
        "shard": "nothing: a wrapper is sharded from the beginning",
        "prepare_gradient_for_backward": "no_sync()",
    }

    @property
    def _fsdp(self) -> FullyShardedDataParallel:
        return cast(FullyShardedDataParallel, self._of[0])

    @property
    def flat_param(self) -> nn.Parameter:
        """The flat parameter, which there is with ``use_orig_params=False`` only."""
        front = self._fsdp._unit.buckets[0].front
        if not isinstance(front, FlatParameter):
            raise UnsupportedError(
                "FlatParamHandle.flat_param of a wrapper with use_orig_params=True: there is none, "
                "its parameters are themselves over this rank's elements; use parameters()"
            )
        return front.param

    @property
    def _fully_sharded_module(self) -> nn.Module:
        return self._fsdp.module

    @property
    def _training_state(self) -> torch_common.HandleTrainingState:
        states, unit = torch_common.HandleTrainingState, self._fsdp._unit
        if unit.is_lent:
            return states.SUMMON_FULL_PARAMS
        holds = state_in_machine(unit).holds & IN_USE
        if not holds:
            return states.IDLE
        return states.FORWARD if holds == Hold.FORWARD else states.BACKWARD_PRE

    @property
    def _use_orig_params(self) -> bool:
        return use_orig_params(self._fsdp)

    @property
    def _offload_params(self) -> bool:
        return self._fsdp.cpu_offload.offload_params

    @property
    def _sharding_strategy(self) -> Any:
        return torch_flat_param.HandleShardingStrategy[self._fsdp.sharding_strategy.name]

    @property
    def uses_sharded_strategy(self) -> bool:
        """True if a rank holds less than all parameters."""
        return self._fsdp.sharding_strategy.name != "NO_SHARD"

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that hold the parameters together."""
        return self._fsdp.process_group

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return self._fsdp.rank

    @property
    def world_size(self) -> int:
        """Their number."""
        return self._fsdp.world_size

    @property
    def device(self) -> torch.device:
        """The device on which forward runs."""
        return self._fsdp.compute_device


def handle_of(fsdp: FullyShardedDataParallel) -> Handle | None:
    """Return the handle of a wrapper; None if it has no parameters of its own."""
    return Handle(fsdp) if fsdp._unit.buckets else None


def wrappers_of_root(fsdp: FullyShardedDataParallel) -> list[FullyShardedDataParallel]:
    """Return a root's wrappers, itself first; [] for others, as PyTorch has it."""
    return fsdp.fsdp_modules(fsdp) if fsdp._is_root else []


def handles_of_root(fsdp: FullyShardedDataParallel) -> list[Handle]:
    """Return the handles of ``wrappers_of_root``."""
    handles = map(handle_of, wrappers_of_root(fsdp))
    return [handle for handle in handles if handle is not None]


def module_to_handle(fsdp: FullyShardedDataParallel) -> dict[nn.Module, Handle | None]:
    """Return the handle by the module that a wrapper is around."""
    return {fsdp.module: handle_of(fsdp)}


def training_state(fsdp: FullyShardedDataParallel) -> torch_common.TrainingState:
    """Return what a wrapper is doing, as a member of PyTorch's enum."""
    states = torch_common.TrainingState
    if fsdp._unit.is_lent:
        return states.SUMMON_FULL_PARAMS
    in_use = state_in_machine(fsdp._unit).holds & IN_USE
    return states.FORWARD_BACKWARD if in_use else states.IDLE


def use_orig_params(fsdp: FullyShardedDataParallel) -> bool:
    """Return the argument of the wrapper."""
    return bool(getattr(fsdp.module, "_fsdp_use_orig_params", False))


def device_mesh_of(fsdp: FullyShardedDataParallel) -> DeviceMesh:
    """Return the mesh, which ours has even if none was given."""
    return fsdp._given.mesh.mesh


def params_of(fsdp: FullyShardedDataParallel) -> list[nn.Parameter]:
    """Return the wrapper's own parameters: its flat parameter, or those over its elements."""
    return [param for bucket in fsdp._unit.buckets for param in bucket.stepped_params]


WRAPPER_INSTEAD = {
    "_device_handle": "summon_full_params",
    "_exec_order_data": "backward_prefetch",
    "_comm_hook": "register_comm_hook",
}
"""Attributes that PyTorch's wrappers have and ours refuse, because None would be wrong."""


def _refusal(name: str, instead: str) -> Callable[[FullyShardedDataParallel], NoReturn]:
    def refuse(fsdp: FullyShardedDataParallel) -> NoReturn:
        raise UnsupportedError(
            f"FullyShardedDataParallel.{name} of fullshard: there is none; use {instead}"
        )

    return refuse


WRAPPER_ATTRIBUTES: dict[str, Any] = {
    "_all_fsdp_states": wrappers_of_root,
    "_all_handles": handles_of_root,
    "_device_mesh": device_mesh_of,
    "_fully_sharded_module_to_handle": module_to_handle,
    "_handle": handle_of,
    "_has_params": lambda fsdp: handle_of(fsdp) is not None,
    "_use_orig_params": use_orig_params,
    "params": params_of,
    "training_state": training_state,
    **{name: _refusal(name, instead) for name, instead in WRAPPER_INSTEAD.items()},
}
"""Properties that our wrappers have while PyTorch is patched."""
