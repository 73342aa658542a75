"""Construction of a unit: first decide everything, then change all modules at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard._torch import nn as _nn
from fullshard.engine import Bucket, Engine, Unit
from fullshard.frontend.additions import Additions
from fullshard.frontend.buckets import BucketPlan, CallOptions, Shown, device_of, plan_buckets
from fullshard.frontend.checks import check_params
from fullshard.frontend.finalization import check_ends_by_itself
from fullshard.frontend.flat_param import FlatPlaces, innermost
from fullshard.frontend.hooks import engine_of, install_forward_hooks, install_state_dict_hooks
from fullshard.frontend.module import sharded_class
from fullshard.frontend.optimizers import check_optimizers_again
from fullshard.frontend.ownership import Subtree, collect, enlist, unit_of
from fullshard.frontend.places import Places
from fullshard.schedule import UnitPolicy
from fullshard.tensors import handle_ops_on

log = logging.getLogger("fullshard")

before_sharding: list[Callable[[], None]] = []
"""Called whenever modules are about to be sharded; ``compat`` looks there for patches."""


def plan_unit(modules: Sequence[nn.Module], choices: CallOptions) -> BucketPlan:
    """Return the plan for ``shard_modules``; raise if ``modules`` cannot be sharded."""
    return _plan(collect(modules, choices.ignored), choices)


def _plan(below: Subtree, choices: CallOptions) -> BucketPlan:
    for unit in below.units:
        engine_of(unit).check_idle("fully_shard")
        check_ends_by_itself(unit)
    check_params(below.params, choices.layout)
    return plan_buckets(below.params, choices)


def shard_modules(modules: Sequence[nn.Module], choices: CallOptions) -> Unit:
    """Make ``modules`` one unit.

    If users see DTensors, the class of each module becomes ``FSDP<Name>``; otherwise ``modules`` is
    one of our wrappers, which already has the methods.
    """
    for look in before_sharding:
        look()
    below = collect(modules, choices.ignored)
    plan = _plan(below, choices)
    device = device_of(choices.mesh)
    buckets = [
        Bucket(spec, [p.param for p in params])
        for spec, params in zip(plan.specs, plan.params, strict=True)
    ]
    places = _places(modules, plan, choices, buckets)
    unit = Unit(
        "",
        buckets,
        places,
        device=device,
        num_members=len(modules),
        num_inside=len(below.units),
    )
    _move_buffers(below.modules, device)
    Engine.join((engine_of(u) for u in below.units), unit, UnitPolicy(choices.after_forward))
    places.show_sharded(buckets)
    for param in chain.from_iterable(bucket.sharded_params for bucket in buckets):
        if isinstance(param, DTensor):
            handle_ops_on(param.device_mesh)
        if choices.shown is Shown.ORIGINALS:
            _nn.mark_flattened(param)
    install_forward_hooks(unit, modules, replace(choices.policy, param_dtype_override_fn=None))
    install_state_dict_hooks(unit, places)
    if choices.shown is Shown.DTENSORS:
        for module in modules:
            module.__class__ = sharded_class(type(module))
            _nn.mark_sharded(module)
    for module in below.modules:
        _nn.mark_managed(module, shows_originals=choices.shown is not Shown.FLAT)
    check_optimizers_again()
    enlist(modules, chain.from_iterable(plan.params), unit)
    places.warn_of_additions = Additions(below.modules).warn
    _name_units(modules, unit)
    _log(unit, modules)
    return unit


def _places(
    modules: Sequence[nn.Module], plan: BucketPlan, choices: CallOptions, buckets: Sequence[Bucket]
) -> Places:
    """Return the places of the parameters, with a flat parameter if users see one."""
    where = [[owned.places for owned in params] for params in plan.params]
    if choices.shown is not Shown.FLAT:
        return Places(where)
    (wrapper,) = modules
    flat = FlatPlaces(where, innermost(next(wrapper.children())))
    flat.front_for(buckets)
    return flat


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _name_units(modules: Sequence[nn.Module], unit: Unit) -> None:
    """Name all units of the tree relative to the new top module."""
    names: dict[Unit, list[str]] = {}
    for root in modules:
        for name, module in root.named_modules():
            inner = unit_of(module)
            if inner is not None and inner is not unit:
                full = name if len(modules) == 1 else f"{type(root).__name__}.{name}"
                names.setdefault(inner, []).append(full)
    for inner, members in names.items():
        inner.name = members[0] if len(members) == 1 else f"{members[0]} to {members[-1]}"
    if len(modules) > 1:
        unit.name = ", ".join(type(module).__name__ for module in modules)


def _log(unit: Unit, modules: Iterable[nn.Module]) -> None:
    numel = sum(p.numel for b in unit.buckets for p in b.spec.layout.params)
    shard = sum(bucket.shards.nbytes for bucket in unit.buckets)
    log.info(
        "unit %s: %d parameters, %d elements in %d bucket(s), %d bytes a rank",
        " + ".join(type(module).__name__ for module in modules),
        unit.num_params,
        numel,
        len(unit.buckets),
        shard,
    )
