"""Attributes of PyTorch's private FSDP files that frameworks read, on modules that we sharded.

The expected values are PyTorch's answers for its own modules.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import _common_utils, _flat_param, _runtime_utils, _traversal_utils
from torch.distributed.fsdp import _unshard_param_utils as unshard_utils
from torch.distributed.fsdp._fully_shard import (
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
)

from fullshard.compat import patch_torch
from fullshard.compat.states import State
from fullshard.errors import UnsupportedError
from tests.ranks.models import refusal, shard_units
from tests.ranks.net import Net, batch, make, shard
from tests.ranks.pool import RankPool, on_ranks

Facts = dict[str, Any]


def sharded(mesh: Any, **options: Any) -> Any:
    model: Any = make()
    return shard_units(model, model.blocks, by=fsdp.fully_shard, mesh=mesh, **options)


def mesh_facts(info: Any) -> Any:
    if info is None:
        return None
    groups = [dist.get_process_group_ranks(info.mesh.get_group(i)) for i in range(info.mesh.ndim)]
    return type(info).__name__, info.shard_mesh_dim, info.replicate_mesh_dim, groups


def group_facts(group: Any, model: nn.Module) -> Facts:
    """Return facts of a group, with parameters sorted by name: PyTorch orders them differently."""
    assert isinstance(group, _fsdp_param_group.FSDPParamGroup)
    name_of = {module: name for name, module in model.named_modules()}
    params = dict(model.named_parameters())
    fsdp_params = sorted(group.fsdp_params, key=lambda param: param._param_fqn)
    return {
        "modules": [name_of[module] for module in group.modules],
        "params": [param._param_fqn for param in fsdp_params],
        "are those shown": [params[p._param_fqn] is p.sharded_param for p in fsdp_params],
        "places": [
            (name_of[p._module_info.module], p._module_info.param_name) for p in fsdp_params
        ],
        "meshes": [mesh_facts(group.mesh_info), mesh_facts(group.post_forward_mesh_info)],
        "device": group.device,
        "state": (group._training_state, group.is_sharded, group.is_unsharded),
        "flags": [group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward],
        "fqn": group._module_fqn,
        "offload": [param.offload_to_cpu for param in fsdp_params],
        "param": {(isinstance(p, _fsdp_param.FSDPParam), p.sharded_state) for p in fsdp_params},
    }


def groups_of(state: Any) -> list[Any]:
    """Return a state's groups; PyTorch 2.11 has one group and no property."""
    has_one = "_fsdp_param_group" not in vars(_fsdp_state.FSDPState)
    return [state._fsdp_param_group] if has_one else state._fsdp_param_groups


def state_facts(model: Any) -> list[Facts]:
    """Return all facts of the states in a tree, from the root to the leaves."""
    facts = []
    for module in model.modules():
        state = _fsdp_state._get_module_fsdp_state(module)
        if state is None:
            assert not isinstance(module, fsdp.FSDPModule)
            continue
        assert state == module._get_fsdp_state() == fsdp.fully_shard.state(module)  # type: ignore
        assert isinstance(state, _fsdp_state.FSDPState)
        assert state in state._state_ctx.all_states
        facts.append(
            {
                "root": state._is_root,
                "states": len(state._state_ctx.all_states),
                "training": state._training_state,
                "device": state._device,
                "dtype": state._mp_policy.param_dtype,
                "auto": state._auto_reshard_after_forward,
                "last": state._state_ctx.is_last_backward,
                "groups": [group_facts(g, model) for g in groups_of(state)],
                "group": group_facts(state._fsdp_param_group, model)["fqn"],
            }
        )
    return facts


def training_states(model: Any) -> list[str]:
    """Return a block's training states in its forward, in its backward and afterwards."""
    found = []
    block = model.blocks[0]

    def ask(*_: Any) -> None:
        found.append(block._get_fsdp_state()._training_state.name)

    def ask_in_both(module: Any, *_: Any) -> None:
        ask()
        handles.append(module.weight.register_hook(ask))

    handles = [block.register_forward_pre_hook(ask_in_both)]
    model(batch()).sum().backward()
    for handle in handles:
        handle.remove()
    ask()
    return found


def different(ours: Facts, theirs: Facts) -> list[Any]:
    assert ours.keys() == theirs.keys()
    return [(key, ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]]


def compare_states(options: Facts, shape: tuple[int, ...]) -> int:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    found = []
    for patched in (True, False):
        with patch_torch() if patched else nullcontext():
            policy = fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float64)
            model = sharded(mesh, mp_policy=policy, **options)
            states = training_states(model)
            assert isinstance(model._get_fsdp_state(), State) or not patched
            assert model._get_fsdp_state()._lazy_init() is None
            model.blocks[1].set_requires_gradient_sync(False)
            facts = state_facts(model)
            model.blocks[0].unshard()
            found.append((states, facts, model.blocks[0]._get_fsdp_state()._fsdp_param_group))
            found[-1] = (*found[-1][:2], found[-1][2].is_unsharded)
    ours, theirs = found
    assert (ours[0], theirs[0]) == (["FORWARD", "PRE_BACKWARD", "IDLE"],) * 2, (ours[0], theirs[0])
    assert ours[2] is theirs[2] is True
    assert len(ours[1]) == len(theirs[1])
    for our_state, their_state in zip(ours[1], theirs[1], strict=True):
        assert different(our_state, their_state) == []
    return len(ours[1])


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_states_are_those_of_fsdp2(pool: RankPool, options: Facts, shape: tuple[int, ...]) -> None:
    world = 2 * len(shape)
    assert pool.run(world, compare_states, options, shape) == [3] * world


def refusals() -> list[str]:
    said = []

    def refused(ask: Any) -> None:
        said.append(refusal(UnsupportedError, ask))

    with patch_torch():
        model = sharded(None)
        state = model._get_fsdp_state()
        group = state._fsdp_param_group
        assert state._comm_ctx == model.blocks[0]._get_fsdp_state()._comm_ctx
        assert state._comm_ctx != sharded(None)._get_fsdp_state()._comm_ctx
        model.blocks[0].set_reduce_scatter_max_input_buffers(2)
        assert state._comm_ctx.reduce_scatter_max_input_buffers == 2
        refused(lambda: state._states_to_forward_prefetch)
        refused(lambda: getattr(state, "_states_to_forward_prefetch", None))
        refused(lambda: group.unshard())
        refused(lambda: setattr(state, "_is_root", False))
        refused(lambda: group.fsdp_params[0].unsharded_param)
        refused(lambda: state.no_such_name)
        assert not hasattr(state, "no_such_name")
        assert _fsdp_state._get_module_fsdp_state(nn.Linear(2, 2)) is None
        mixed = make()
        mixed.blocks[0].float()
        fsdp.fully_shard(mixed)
        assert len(mixed._get_fsdp_state()._fsdp_param_groups) == 2  # type: ignore[operator]
        if hasattr(_fsdp_state.FSDPState, "_fsdp_param_group"):
            refused(lambda: mixed._get_fsdp_state()._fsdp_param_group)  # type: ignore[operator]
        theirs = wrapped(Net().double(), use_orig_params=True)
        handle = theirs._handle
        refused(lambda: handle.flat_param)
        refused(lambda: handle.flat_param_to("cpu"))
        refused(lambda: _runtime_utils._unshard(theirs, handle, None, None))
        refused(lambda: _runtime_utils._reshard(theirs, handle, True))
    assert not hasattr(model, "_get_fsdp_state") and not hasattr(theirs, "_handle")
    return said


def test_what_cannot_be_true_is_refused_with_what_to_use(pool: RankPool) -> None:
    said, other = pool.run(2, refusals)
    assert said == other
    assert all("use " in one or "docs/compat.md" in one for one in said)
    assert "set_modules_to_forward_prefetch" in said[1] and "FSDPModule.unshard" in said[2]
    assert ".to()" in said[-3] and "summon_full_params" in said[-2]


def wrapped(model: Net, **options: Any) -> Any:
    policy = fsdp.wrap.ModuleWrapPolicy({nn.Linear})
    device = torch.device("cpu")
    return fsdp.FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=device, **options
    )


def flat_facts(model: Any, use_orig_params: bool) -> Facts:
    assert _runtime_utils._lazy_init(model, model) in (None, model)
    states, modules = _traversal_utils._get_fsdp_states_with_modules(model)
    handles = _traversal_utils._get_fsdp_handles(model)
    name_of = {module: name for name, module in model.named_modules()}
    inner = model.blocks[0]
    training: list[Any] = []

    def ask(*_: Any) -> None:
        training.append((inner.training_state.name, inner._handle._training_state.name))

    hook = inner.module.register_forward_pre_hook(ask)
    model(batch()).sum().backward()
    hook.remove()
    ask()
    with unshard_utils._unshard_params(model, True, True, False, False, False):
        training.append(model.training_state.name)
        shapes = [tuple(param.shape) for param in model.parameters()]
    with unshard_utils._unshard_params_for_summon(inner, inner, False, False, False, False):
        shapes += [tuple(param.shape) for param in inner.parameters()]
    whole = unshard_utils._unshard_params(model, True, True, False, False, False)
    with pytest.raises(ZeroDivisionError), whole:
        raise ZeroDivisionError
    own = [isinstance(param, fsdp.FlatParameter) for param in model.parameters()]
    flat = [] if use_orig_params else [handle.flat_param for handle in handles]
    return {
        "states": [name_of[state] for state in states],
        "modules": modules == states == _traversal_utils._get_fsdp_states(model),
        "roots": _runtime_utils._get_fsdp_root_states(model) == [model],
        "is root": [_runtime_utils._is_fsdp_root(state, state) for state in states],
        "state": [_common_utils._get_module_fsdp_state(state) is state for state in states],
        "plain": _common_utils._get_module_fsdp_state(nn.Linear(2, 2)),
        "all": [model._all_fsdp_states == states, model._all_handles == handles],
        "handles": [isinstance(handle, _flat_param.FlatParamHandle) for handle in handles],
        "module": [name_of[handle._fully_sharded_module] for handle in handles],
        "flat": [any(one is p for p in model.parameters()) for one in flat],
        "is flat": own,
        "flattened": [_common_utils._is_fsdp_flattened(param) for param in model.parameters()],
        "options": [
            (h._use_orig_params, h.uses_sharded_strategy, h._sharding_strategy.name, h.rank)
            for h in handles
        ],
        "wrapper": (model._has_params, model._use_orig_params, h_of(model), training, shapes),
        "ranks": [(h.world_size, h._offload_params, h.device) for h in handles],
    }


def h_of(model: Any) -> list[bool]:
    return [handle == model._handle for handle in model._fully_sharded_module_to_handle.values()]


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_states_and_handles_are_those_of_fsdp1(use_orig_params: bool) -> None:
    found = []
    for patched in (True, False):
        with patch_torch() if patched else nullcontext():
            model = wrapped(copy.deepcopy(make()), use_orig_params=use_orig_params)
            found.append(flat_facts(model, use_orig_params))
    assert different(*found) == []
    assert len(found[0]["handles"]) == 5


def read_of_an_unrun_model() -> list[bool]:
    """Read attributes of a model that has not run yet; return whether each is right."""
    with patch_torch():
        model = shard(make())
        from torch.distributed.fsdp._fully_shard._fsdp_init import (
            _get_managed_modules,
            _get_managed_states,
        )

        state = fsdp.fully_shard.state(model)  # type: ignore[attr-defined]
        (group,) = state._fsdp_param_groups
        first = group.reduce_scatter_max_input_buffers
        model.set_reduce_scatter_max_input_buffers(2)
        managed = _get_managed_modules((model,))
        params, _ = _get_managed_states(managed)
        plain = make()
        wrapper = fsdp.FullyShardedDataParallel(plain.blocks[0], device_id="cpu")
        whole = fsdp.FullyShardedDataParallel(
            make(), device_id=torch.device("cpu"), use_orig_params=True
        )
        return [
            state._state_ctx.all_states[0] == state,
            [s._is_root for s in state._state_ctx.all_states] == [True, False, False],
            group.mesh_info.mesh == model.head.weight.device_mesh,
            (first, group.reduce_scatter_max_input_buffers) == (1, 2),
            set(managed) == set(model.modules()) - set(model.blocks),
            {id(p) for p in params}
            == {id(p) for n, p in model.named_parameters() if not n.startswith("blocks")},
            [p is wrapper._handle.flat_param for p in wrapper.params] == [True],
            list(map(id, whole.params)) == list(map(id, whole.parameters())),
        ]


def test_an_unrun_model_can_be_read(pool: RankPool) -> None:
    assert pool.run(2, read_of_an_unrun_model) == [[True] * 8] * 2
