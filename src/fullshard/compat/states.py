"""The states of modules that ``fully_shard`` sharded, as PyTorch's private files show them.

All attribute names are PyTorch's. Which there are, and what to use for others: docs/compat.md.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.fsdp._fully_shard import _fsdp_init as torch_init
from torch.distributed.fsdp._fully_shard import _fsdp_param as torch_param
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as torch_group
from torch.distributed.fsdp._fully_shard import _fsdp_state as torch_state
from torch.distributed.tensor import Replicate

from fullshard.compat.views import View
from fullshard.engine import Engine, MixedPrecisionPolicy, Unit
from fullshard.engine.bucket import Bucket
from fullshard.errors import UnsupportedError
from fullshard.frontend.hooks import engine_of, policy_of
from fullshard.frontend.ownership import members_of, unit_of, units_below
from fullshard.frontend.places import places_of
from fullshard.frontend.sharded import unit_and_engine
from fullshard.schedule import AfterForward, Hold, Residency, UnitPolicy, UnitState
from fullshard.schedule.state import IN_USE
from fullshard.tensors import DTensorForm, PlainForm

_theirs = torch_state._get_module_fsdp_state
_their_managed = torch_init._get_managed_modules


def state_of(module: nn.Module) -> State | None:
    """Return the state for ``fully_shard.state(module)``; None if ``module`` is not sharded."""
    unit = unit_of(module)
    return None if unit is None else State(unit)


def module_state(module: nn.Module) -> Any:
    """Return the state of a module that either PyTorch or we sharded; None if nobody did."""
    return state_of(module) or _theirs(module)


def managed_modules(
    root_modules: tuple[nn.Module, ...],
    ignored_params: set[nn.Parameter] | None = None,
    **options: Any,
) -> list[nn.Module]:
    """Return the modules below ``root_modules`` that no call has sharded, PyTorch's or ours."""
    found = _their_managed(root_modules, ignored_params, **options)
    members = {one for unit in units_below(root_modules) for one in members_of(unit)}
    inside = {inner for one in members.difference(root_modules) for inner in one.modules()}
    return [module for module in found if module not in inside]


def own_state(module: nn.Module) -> State:
    """Implement ``FSDPModule._get_fsdp_state``."""
    return State(unit_and_engine(module)[0])


def state_in_machine(unit: Unit) -> UnitState:
    """Return what the scheduler knows of ``unit`` at this moment."""
    return engine_of(unit).scheduler.residents.units[unit.key]


def is_root(unit: Unit) -> bool:
    """Return whether no other unit encloses ``unit``; the root's unit is made last."""
    return engine_of(unit).units[-1] is unit


def _training_state(unit: Unit) -> torch_common.TrainingState:
    holds = state_in_machine(unit).holds & IN_USE
    if not holds:
        return torch_common.TrainingState.IDLE
    in_forward = holds & Hold.FORWARD and not engine_of(unit).scheduler.in_backward
    states = torch_common.TrainingState
    return states.FORWARD if in_forward else states.PRE_BACKWARD


def _sharded_state(unit: Unit) -> torch_param.ShardedState:
    states = torch_param.ShardedState
    residency = state_in_machine(unit).residency
    if residency is Residency.SECONDARY:
        return states.SHARDED_POST_FORWARD
    return states.UNSHARDED if residency is Residency.UNSHARDED else states.SHARDED


def _mesh_info(bucket: Bucket) -> torch_common.DataParallelMeshInfo:
    """Return the data-parallel mesh of ``bucket``, whose dims have the roles of its placements.

    Raises:
        UnsupportedError: if parameters are cut over ranks that are not data-parallel, too.
    """
    form = bucket.spec.form
    form = form.dtensors if isinstance(form, PlainForm) else form
    if bucket.spec.parallel is not None or not isinstance(form, DTensorForm):
        raise UnsupportedError(
            "FSDPParamGroup.mesh_info: parameters are tensor-parallel, and their mesh has more "
            "dims than the one that fully_shard was given; use that one"
        )
    place = form.places[0]
    dims: dict[bool, int] = {
        isinstance(placement, Replicate): dim for dim, placement in enumerate(place.placements)
    }
    if True not in dims:
        return torch_common.FSDPMeshInfo(place.mesh, shard_mesh_dim=dims[False])
    if False not in dims:
        return torch_common.DDPMeshInfo(place.mesh, replicate_mesh_dim=dims[True])
    return torch_common.HSDPMeshInfo(
        place.mesh, shard_mesh_dim=dims[False], replicate_mesh_dim=dims[True]
    )


class State(View):
    """The state of a sharded module (``FSDPState``).

    ``torch.distributed.pipelining`` ends a step by it. The gradients of a pipeline come from
    ``autograd.grad``, or were accumulated by backwards that do not reduce. Pipelining calls
    ``post_backward`` on all groups of all states, then the final callback of one state. That
    callback does all of the work.
    """

    stands_for = torch_state.FSDPState
    instead: ClassVar[dict[str, str]] = {
        "_states_to_forward_prefetch": "FSDPModule.set_modules_to_forward_prefetch",
        "_states_to_backward_prefetch": "FSDPModule.set_modules_to_backward_prefetch",
        "_pre_forward": "fullshard.register_fsdp_forward_method",
        "_post_forward": "fullshard.register_fsdp_forward_method",
        "_reset_iter_state": "FSDPModule.reset_iter_state",
    }

    @property
    def _unit(self) -> Unit:
        return cast(Unit, self._of[0])

    @property
    def _is_root(self) -> bool:
        return is_root(self._unit)

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return tuple(members_of(self._unit))

    @property
    def _device(self) -> torch.device:
        return self._unit.device

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return policy_of(self._modules[0])

    @property
    def _training_state(self) -> torch_common.TrainingState:
        return _training_state(self._unit)

    @property
    def _auto_reshard_after_forward(self) -> bool:
        return engine_of(self._unit).policy_of(self._unit).after_forward is AfterForward.AUTO

    @property
    def _state_ctx(self) -> StateContext:
        return StateContext(engine_of(self._unit))

    @property
    def _comm_ctx(self) -> CommContext:
        """The context of the streams; contexts of modules that share streams are equal."""
        engine = engine_of(self._unit)
        return CommContext(engine.lanes, engine)

    @property
    def _fsdp_param_groups(self) -> list[ParamGroup]:
        return [ParamGroup(self._unit, bucket) for bucket in self._unit.buckets]

    @property
    def _fsdp_param_group(self) -> ParamGroup | None:
        """The only group, or None; of several (by dtype, for instance), the first would be wrong.

        Raises:
            UnsupportedError: if there are several.
        """
        groups = self._fsdp_param_groups
        # PyTorch 2.11 knows no other name, and only wants to call ``post_backward``.
        if len(groups) > 1 and hasattr(torch_state.FSDPState, "_fsdp_param_group"):
            raise UnsupportedError(
                f"FSDPState._fsdp_param_group: unit {self._unit.name or '(root)'} has "
                f"{len(groups)} groups, one for each mesh and dtype; use _fsdp_param_groups"
            )
        return groups[0] if groups else None

    def _lazy_init(self) -> None:
        """Do nothing, because nothing is initialised late."""

    def _root_post_backward_final_callback(self) -> None:
        engine_of(self._unit).reduce_now()


class StateContext(View):
    """The context that all sharded modules of a tree share (``FSDPStateContext``)."""

    stands_for = torch_state.FSDPStateContext

    @property
    def _engine(self) -> Engine:
        return cast(Engine, self._of[0])

    @property
    def all_states(self) -> list[State]:
        """The states of all sharded modules of the tree, the root's first, in module order."""
        units = self._engine.units
        in_order = units_below(members_of(units[-1]))
        return [State(unit) for unit in dict.fromkeys((*in_order, *units))]

    @property
    def is_last_backward(self) -> bool:
        """The value of ``set_is_last_backward``."""
        return self._engine.scheduler.policy.is_last_backward


class CommContext(View):
    """The context that all sharded modules with the same streams share (``FSDPCommContext``)."""

    stands_for = torch_group.FSDPCommContext

    def __eq__(self, other: object) -> bool:
        """Compare the streams, which ``share_comm_ctx`` gives to several trees."""
        return type(other) is CommContext and other._of[0] is self._of[0]

    def __hash__(self) -> int:
        return hash(self._of[0])

    @property
    def reduce_scatter_max_input_buffers(self) -> int:
        """The number of units whose reductions fit into the reduction budget, 1 without one."""
        engine = cast(Engine, self._of[1])
        budget = engine.scheduler.policy.reduction_budget
        largest = sorted((unit.reduction_nbytes for unit in engine.units), reverse=True)
        fitting = [n for n, total in enumerate(accumulate(largest), 1) if total <= (budget or 0)]
        return fitting[-1] if fitting else 1


_BY_THE_MODULE = {
    "unshard": "FSDPModule.unshard",
    "wait_for_unshard": "the handle of FSDPModule.unshard(async_op=True)",
    "reshard": "FSDPModule.reshard",
    "lazy_init": "nothing: nothing is initialised late",
    "pre_forward": "fullshard.register_fsdp_forward_method",
    "post_forward": "fullshard.register_fsdp_forward_method",
    "pre_backward": "backward",
    "comm_ctx": "fullshard.share_comm_ctx",
    "offload_policy": "the offload_policy that fully_shard was given",
    "gradient_divide_factor": "FSDPModule.set_gradient_divide_factor",
}


class ParamGroup(View):
    """A group of parameters that move together (``FSDPParamGroup``): a bucket of a unit."""

    stands_for = torch_group.FSDPParamGroup
    instead = _BY_THE_MODULE

    @property
    def _unit(self) -> Unit:
        return cast(Unit, self._of[0])

    @property
    def _bucket(self) -> Bucket:
        return cast(Bucket, self._of[1])

    @property
    def _policy(self) -> UnitPolicy:
        return engine_of(self._unit).policy_of(self._unit)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules of the call of ``fully_shard``."""
        return tuple(members_of(self._unit))

    @property
    def fsdp_params(self) -> list[Param]:
        """The parameters."""
        numbers = range(len(self._bucket.sharded_params))
        return [Param(self._unit, self._bucket, number) for number in numbers]

    @property
    def device(self) -> torch.device:
        """The device on which forward runs."""
        return self._bucket.spec.device

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The dtypes of the unit."""
        return policy_of(self.modules[0])

    @property
    def mesh_info(self) -> torch_common.DataParallelMeshInfo:
        """The mesh and what its dims are for, as an object of PyTorch's."""
        return _mesh_info(self._bucket)

    @property
    def post_forward_mesh_info(self) -> torch_common.DataParallelMeshInfo | None:
        """The mesh over which parameters are cut between forward and backward, if they are."""
        if self._policy.after_forward is AfterForward.SECONDARY:
            raise UnsupportedError(
                "FSDPParamGroup.post_forward_mesh_info: reshard_after_forward is an int, whose "
                "smaller groups are in no mesh; use the number that fully_shard was given"
            )
        return None if self._policy.keeps(is_root(self._unit)) else self.mesh_info

    @property
    def _module_fqn(self) -> str:
        return self._unit.name

    @property
    def _training_state(self) -> torch_common.TrainingState:
        return _training_state(self._unit)

    @property
    def _sharded_state(self) -> torch_param.ShardedState:
        return _sharded_state(self._unit)

    @property
    def is_sharded(self) -> bool:
        """True if only the shards are in memory."""
        return self._sharded_state is torch_param.ShardedState.SHARDED

    @property
    def is_unsharded(self) -> bool:
        """True if whole parameters are in memory and usable."""
        return self._sharded_state is torch_param.ShardedState.UNSHARDED

    @property
    def reduce_grads(self) -> bool:
        """The value of ``set_requires_gradient_sync``."""
        return self._policy.requires_gradient_sync

    @property
    def all_reduce_grads(self) -> bool:
        """The value of ``set_requires_all_reduce``."""
        return self._policy.requires_all_reduce

    @property
    def reshard_after_backward(self) -> bool:
        """The value of ``set_reshard_after_backward``."""
        return self._policy.reshard_after_backward

    @property
    def unshard_in_backward(self) -> bool:
        """The value of ``set_unshard_in_backward``."""
        return self._policy.unshard_in_backward

    @property
    def reduce_scatter_max_input_buffers(self) -> int:
        """The number of units whose reductions fit into the reduction budget, 1 without one."""
        return State(self._unit)._comm_ctx.reduce_scatter_max_input_buffers

    def post_backward(self) -> None:
        """Do nothing, because the final callback does the work."""


class Param(View):
    """A parameter of a group (``FSDPParam``)."""

    stands_for = torch_param.FSDPParam
    instead: ClassVar[dict[str, str]] = {
        "unsharded_param": "fullshard.unshard_params",
        "_unsharded_param": "fullshard.unshard_params",
        "_sharded_param_data": "sharded_param.to_local()",
        "to_sharded": "FSDPModule.reshard",
        "to_unsharded": "FSDPModule.unshard",
    }

    @property
    def _number(self) -> int:
        return cast(int, self._of[2])

    @property
    def sharded_param(self) -> nn.Parameter:
        """The parameter as optimizers and checkpoints see it."""
        return cast(Bucket, self._of[1]).sharded_params[self._number]

    @property
    def _param_fqn(self) -> str:
        unit, bucket = cast(Unit, self._of[0]), cast(Bucket, self._of[1])
        return ".".join(part for part in (unit.name, bucket.names[self._number]) if part)

    @property
    def _module_info(self) -> torch_param.ParamModuleInfo:
        unit, bucket = cast(Unit, self._of[0]), self._of[1]
        number = [one is bucket for one in unit.buckets].index(True)
        slots = places_of(unit).slots()
        found = [s.place for s in slots if (s.bucket, s.number) == (number, self._number)]
        first, others = found[0], found[1:]
        modules, names = [one.module for one in others], [one.name for one in others]
        return torch_param.ParamModuleInfo(first.module, first.name, modules, names)

    @property
    def mesh_info(self) -> torch_common.DataParallelMeshInfo:
        """See ``ParamGroup.mesh_info``."""
        return _mesh_info(cast(Bucket, self._of[1]))

    @property
    def sharded_state(self) -> torch_param.ShardedState:
        """The state of the unit: whether whole parameters are in memory."""
        return _sharded_state(cast(Unit, self._of[0]))

    @property
    def offload_to_cpu(self) -> bool:
        """True if the shards are kept on the CPU."""
        return cast(Bucket, self._of[1]).spec.offload is not None
