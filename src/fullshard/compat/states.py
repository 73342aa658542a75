"""The states of modules that ``fully_shard`` sharded, as PyTorch's private files show them.

All attribute names are PyTorch's. docs/compat.md lists them, with alternatives to those that raise.
Read-only views take the place of objects of PyTorch's private classes. Each view has a table of
attributes and of the functions that compute them. Other functions replace PyTorch's private ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from itertools import accumulate
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.distributed.fsdp._fully_shard import _fsdp_state as torch_state
from torch.distributed.fsdp._fully_shard import _fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import ParamModuleInfo, ShardedState
from torch.distributed.tensor import Replicate

from fullshard.device import Lanes
from fullshard.engine import Engine, MixedPrecisionPolicy, Unit
from fullshard.engine.bucket import Bucket
from fullshard.errors import UnsupportedError
from fullshard.frontend import FSDPModule
from fullshard.frontend.hooks import engine_of, policy_of
from fullshard.frontend.ownership import full_name, members_of, unit_of, units_below
from fullshard.frontend.places import places_of
from fullshard.frontend.sharded import unit_and_engine
from fullshard.schedule import AfterForward, Hold, Residency, UnitPolicy, UnitState
from fullshard.schedule.state import IN_USE
from fullshard.tensors import RaggedTensor

_TABLE = "docs/compat.md lists what there is under private names"

originals: dict[object, Any] = {}
"""Our replacement -> the object of PyTorch's that it replaced in the first patch."""


def torch_file(name: str) -> ModuleType | None:
    """Return a module of ``torch.distributed.fsdp``; None if this PyTorch does not have it."""
    with suppress(ImportError):
        return import_module(f"torch.distributed.fsdp.{name}")
    return None


def torch_name(path: str) -> Any:
    """Return an object of ``torch.distributed.fsdp``, imported now: "_flat_param.FlatParamHandle".

    Raises:
        UnsupportedError: if this PyTorch does not have it.
    """
    file, _, name = path.rpartition(".")
    found = getattr(torch_file(file), name, None)
    if found is None:
        raise UnsupportedError(
            f"PyTorch {torch.__version__} has no torch.distributed.fsdp.{path}, so the private "
            "names of PyTorch's FSDP that need it cannot be read; use the public methods of the "
            "module"
        )
    return found


class _Absent(UnsupportedError, AttributeError):
    """An error for ``hasattr`` and ``getattr`` with a default, by which programs ask for names."""


class View:
    """A read-only view of our engine under the attribute names of a private class of PyTorch's.

    A view passes ``isinstance`` with PyTorch's class, which itself stays in place, because
    PyTorch's own ``replicate`` builds on it. Names in ``instead`` raise even for ``hasattr``:
    programs that need these names must fail here.
    """

    stands_for: ClassVar[str]
    """PyTorch's class, as in ``torch_name``."""
    shown: ClassVar[Mapping[str, Callable[..., object]]]
    """Names to read -> functions of the objects that the view was made of."""
    instead: ClassVar[Mapping[str, str]] = {}
    """Names of PyTorch's class that cannot be true here -> what to use."""

    _of: tuple[Any, ...]

    def __init__(self, *of: object) -> None:
        torch_name(self.stands_for)  # raises here instead of in ``isinstance``
        object.__setattr__(self, "_of", of)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return torch_name(self.stands_for)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._of == self._of

    def __hash__(self) -> int:
        return hash((type(self), self._of))

    def __getattr__(self, name: str) -> Any:
        """Return what ``shown`` has under ``name``; refuse other names."""
        if name in self.shown:
            return self.shown[name](*self._of)
        what = f"{self.stands_for.rpartition('.')[2]}.{name} of a module that fullshard shards"
        if name in self.instead:
            raise UnsupportedError(f"{what}: there is none; use {self.instead[name]}")
        raise _Absent(f"{what}: there is none; {_TABLE}")

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse all writes."""
        raise UnsupportedError(
            f"{self.stands_for.rpartition('.')[2]}.{name} = {value!r}: states of modules that "
            "fullshard shards can only be read; use "
            f"{self.instead.get(name, 'the methods of the module')}"
        )


def state_in_machine(unit: Unit) -> UnitState:
    """Return the scheduler's current state of ``unit``."""
    return engine_of(unit).scheduler.residents.units[unit.key]


def _flags(unit: Unit) -> UnitPolicy:
    return engine_of(unit).policy_of(unit)


def _is_root(unit: Unit) -> bool:
    """Return whether no other unit encloses ``unit``; the root's unit is made last."""
    return engine_of(unit).units[-1] is unit


def _dtypes(unit: Unit) -> MixedPrecisionPolicy:
    return policy_of(members_of(unit)[0])


def _training_state(unit: Unit) -> common.TrainingState:
    holds = state_in_machine(unit).holds & IN_USE
    if not holds:
        return common.TrainingState.IDLE
    in_forward = holds & Hold.FORWARD and not engine_of(unit).scheduler.in_backward
    return common.TrainingState.FORWARD if in_forward else common.TrainingState.PRE_BACKWARD


def _sharded_state(unit: Unit) -> ShardedState:
    residency = state_in_machine(unit).residency
    if residency is Residency.SECONDARY:
        return ShardedState.SHARDED_POST_FORWARD
    return ShardedState.UNSHARDED if residency is Residency.UNSHARDED else ShardedState.SHARDED


def _do_nothing() -> None:
    """Take the place of a method that fullshard does not need."""


def _mesh_info(bucket: Bucket) -> common.DataParallelMeshInfo:
    """Return the data-parallel mesh of ``bucket``, whose dims have the roles of its placements.

    Raises:
        UnsupportedError: if parameters are also cut over ranks that are not data-parallel.
    """
    if bucket.spec.parallel is not None:
        raise UnsupportedError(
            "FSDPParamGroup.mesh_info: parameters are tensor-parallel, and their mesh has more "
            "dims than the one that fully_shard was given; use that one"
        )
    place = bucket.spec.form.places[0]
    dims = {isinstance(one, Replicate): dim for dim, one in enumerate(place.placements)}
    if True not in dims:
        return common.FSDPMeshInfo(place.mesh, shard_mesh_dim=dims[False])
    if False not in dims:
        return common.DDPMeshInfo(place.mesh, replicate_mesh_dim=dims[True])
    return common.HSDPMeshInfo(
        place.mesh, shard_mesh_dim=dims[False], replicate_mesh_dim=dims[True]
    )


def _post_forward_mesh_info(unit: Unit, bucket: Bucket) -> common.DataParallelMeshInfo | None:
    """Return the mesh over which parameters are cut between forward and backward, if they are."""
    if _flags(unit).after_forward is AfterForward.SECONDARY:
        raise UnsupportedError(
            "FSDPParamGroup.post_forward_mesh_info: reshard_after_forward is an int, whose "
            "smaller groups are in no mesh; use the number that fully_shard was given"
        )
    return None if _flags(unit).keeps(_is_root(unit)) else _mesh_info(bucket)


def _max_buffers(engine: Engine) -> int:
    """Return how many units' reductions fit into the reduction budget; 1 without a budget."""
    budget = engine.scheduler.policy.reduction_budget
    largest = sorted((unit.reduction_nbytes for unit in engine.units), reverse=True)
    fitting = [n for n, total in enumerate(accumulate(largest), 1) if total <= (budget or 0)]
    return fitting[-1] if fitting else 1


def _all_states(engine: Engine) -> list[State]:
    """Return the states of all sharded modules of a tree, the root's first, in module order."""
    in_order = units_below(members_of(engine.units[-1]))
    return [State(unit) for unit in dict.fromkeys((*in_order, *engine.units))]


def _groups(unit: Unit) -> list[ParamGroup]:
    return [ParamGroup(unit, bucket) for bucket in unit.buckets]


def _only_group(unit: Unit) -> ParamGroup | None:
    """Return the only group, or None; of several (one for each dtype) the first would be wrong.

    Raises:
        UnsupportedError: if there are several.
    """
    # PyTorch 2.11 knows no other name, and only wants to call ``post_backward``.
    if len(unit.buckets) > 1 and hasattr(torch_state.FSDPState, "_fsdp_param_group"):
        raise UnsupportedError(
            f"FSDPState._fsdp_param_group: unit {unit.shown_name} has "
            f"{len(unit.buckets)} groups, one for each mesh and dtype; use _fsdp_param_groups"
        )
    return _groups(unit)[0] if unit.buckets else None


def _params(unit: Unit, bucket: Bucket) -> list[Param]:
    return [Param(unit, bucket, number) for number in range(len(bucket.sharded_params))]


def _module_info(unit: Unit, bucket: Bucket, number: int) -> ParamModuleInfo:
    """Return the places of a parameter in modules; shared parameters have several."""
    key = [one is bucket for one in unit.buckets].index(True), number
    found = [s.place for s in places_of(unit).slots() if (s.bucket, s.number) == key]
    first, others = found[0], found[1:]
    modules, names = [one.module for one in others], [one.name for one in others]
    return ParamModuleInfo(first.module, first.name, modules, names)


class State(View):
    """The state of a sharded module (``FSDPState``), of a unit.

    ``torch.distributed.pipelining`` ends a step by it. The gradients of a pipeline come from
    ``autograd.grad``, or were accumulated by backwards that do not reduce. Pipelining calls
    ``post_backward`` on all groups of all states, then the final callback of one state. That
    callback does all of the work.
    """

    stands_for = "_fully_shard._fsdp_state.FSDPState"
    shown: ClassVar[Mapping[str, Callable[[Unit], object]]] = {
        "_is_root": _is_root,
        "_modules": lambda unit: tuple(members_of(unit)),
        "_device": lambda unit: unit.device,
        "_mp_policy": _dtypes,
        "_training_state": _training_state,
        "_auto_reshard_after_forward": lambda unit: _flags(unit).after_forward is AfterForward.AUTO,
        "_state_ctx": lambda unit: StateContext(engine_of(unit)),
        "_comm_ctx": lambda unit: CommContext(engine_of(unit).lanes, engine_of(unit)),
        "_fsdp_param_groups": _groups,
        "_fsdp_param_group": _only_group,
        "_lazy_init": lambda unit: _do_nothing,
        "_root_post_backward_final_callback": lambda unit: engine_of(unit).reduce_now,
    }
    instead: ClassVar[Mapping[str, str]] = {
        "_states_to_forward_prefetch": "FSDPModule.set_modules_to_forward_prefetch",
        "_states_to_backward_prefetch": "FSDPModule.set_modules_to_backward_prefetch",
        "_pre_forward": "fullshard.register_fsdp_forward_method",
        "_post_forward": "fullshard.register_fsdp_forward_method",
        "_reset_iter_state": "FSDPModule.reset_iter_state",
    }


class StateContext(View):
    """The context that all sharded modules of a tree share (``FSDPStateContext``), of an engine."""

    stands_for = "_fully_shard._fsdp_state.FSDPStateContext"
    shown: ClassVar[Mapping[str, Callable[[Engine], object]]] = {
        "all_states": _all_states,
        "is_last_backward": lambda engine: engine.scheduler.policy.is_last_backward,
    }


class CommContext(View):
    """The context that all sharded modules with the same streams share (``FSDPCommContext``).

    The view is of the streams and an engine; ``share_comm_ctx`` lets several trees share streams.
    """

    stands_for = "_fully_shard._fsdp_param_group.FSDPCommContext"
    shown: ClassVar[Mapping[str, Callable[[Lanes, Engine], object]]] = {
        "reduce_scatter_max_input_buffers": lambda lanes, engine: _max_buffers(engine),
    }

    def __eq__(self, other: object) -> bool:
        return type(other) is CommContext and other._of[0] is self._of[0]

    def __hash__(self) -> int:
        return hash(self._of[0])


class ParamGroup(View):
    """A group of parameters that move together (``FSDPParamGroup``), of a unit and its bucket."""

    stands_for = "_fully_shard._fsdp_param_group.FSDPParamGroup"
    shown: ClassVar[Mapping[str, Callable[[Unit, Bucket], object]]] = {
        "modules": lambda unit, bucket: tuple(members_of(unit)),
        "fsdp_params": _params,
        "device": lambda unit, bucket: bucket.spec.device,
        "mp_policy": lambda unit, bucket: _dtypes(unit),
        "mesh_info": lambda unit, bucket: _mesh_info(bucket),
        "post_forward_mesh_info": _post_forward_mesh_info,
        "_module_fqn": lambda unit, bucket: unit.name,
        "_training_state": lambda unit, bucket: _training_state(unit),
        "_sharded_state": lambda unit, bucket: _sharded_state(unit),
        "is_sharded": lambda unit, bucket: _sharded_state(unit) is ShardedState.SHARDED,
        "is_unsharded": lambda unit, bucket: _sharded_state(unit) is ShardedState.UNSHARDED,
        "reduce_grads": lambda unit, bucket: _flags(unit).requires_gradient_sync,
        "all_reduce_grads": lambda unit, bucket: _flags(unit).requires_all_reduce,
        "reshard_after_backward": lambda unit, bucket: _flags(unit).reshard_after_backward,
        "unshard_in_backward": lambda unit, bucket: _flags(unit).unshard_in_backward,
        "reduce_scatter_max_input_buffers": lambda unit, bucket: _max_buffers(engine_of(unit)),
        "post_backward": lambda unit, bucket: _do_nothing,
    }
    instead: ClassVar[Mapping[str, str]] = {
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


class Param(View):
    """A parameter of a group (``FSDPParam``), of a unit, its bucket and the parameter's index."""

    stands_for = "_fully_shard._fsdp_param.FSDPParam"
    shown: ClassVar[Mapping[str, Callable[[Unit, Bucket, int], object]]] = {
        "sharded_param": lambda unit, bucket, number: bucket.sharded_params[number],
        "_param_fqn": lambda unit, bucket, number: full_name(unit, bucket.names[number]),
        "_module_info": _module_info,
        "mesh_info": lambda unit, bucket, number: _mesh_info(bucket),
        "sharded_state": lambda unit, bucket, number: _sharded_state(unit),
        "offload_to_cpu": lambda unit, bucket, number: bucket.spec.offload is not None,
    }
    instead: ClassVar[Mapping[str, str]] = {
        "unsharded_param": "fullshard.unshard_params",
        "_unsharded_param": "fullshard.unshard_params",
        "_sharded_param_data": "sharded_param.to_local()",
        "to_sharded": "FSDPModule.reshard",
        "to_unsharded": "FSDPModule.unshard",
    }


def state_of(module: nn.Module) -> State | None:
    """Return the state for ``fully_shard.state(module)``; None if ``module`` is not sharded."""
    unit = unit_of(module)
    return None if unit is None else State(unit)


def module_state(module: nn.Module) -> Any:
    """Return the state of a module that either PyTorch or we sharded, else None."""
    return state_of(module) or originals[module_state](module)


def own_state(module: nn.Module) -> State:
    """Implement ``FSDPModule._get_fsdp_state``."""
    return State(unit_and_engine(module)[0])


def managed_modules(
    root_modules: tuple[nn.Module, ...], *rest: Any, **options: Any
) -> list[nn.Module]:
    """Return the modules below ``root_modules`` that no call has sharded, PyTorch's or ours."""
    found = originals[managed_modules](root_modules, *rest, **options)
    members = {one for unit in units_below(root_modules) for one in members_of(unit)}
    inside = {inner for one in members.difference(root_modules) for inner in one.modules()}
    return [module for module in found if module not in inside]


def policy_for_param(policy: MixedPrecisionPolicy, param: nn.Parameter) -> MixedPrecisionPolicy:
    """Implement ``policy._resolve_for_param``, which PyTorch's ``replicate`` calls from 2.15 on."""
    return policy.for_param("of a module given to replicate", param)


def distribute_tensors(
    local_state_dict: dict[str, Any], keys: list[str], device: Any, pg: Any = None
) -> None:
    """Replace each pair of a tensor and its full value by the tensor with this rank's part of it.

    ``set_model_state_dict`` calls this for full state dicts; PyTorch's function slices all tensors.
    """
    rest = []
    for key in keys:
        pair = local_state_dict.get(key)
        if isinstance(pair, tuple) and isinstance(pair[0], RaggedTensor):
            target, value = pair[0].detach(), pair[1]
            if target.is_meta:
                target = torch.empty_like(target, device=value.device)
            local_state_dict[key] = target.copy_(value)
        else:
            rest.append(key)
    originals[distribute_tensors](local_state_dict, rest, device, pg)


def get_cls_to_fsdp_cls() -> dict[type, type]:
    """Return PyTorch's and our map of module classes to sharded classes, which Dynamo reads."""
    subclasses = FSDPModule.__subclasses__()
    ours = {cls.__bases__[1]: cls for cls in subclasses if len(cls.__bases__) == 2}
    return torch_fully_shard.cls_to_fsdp_cls | ours
