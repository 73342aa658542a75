"""From modules and choices to a unit: decide everything, then change the modules at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard.engine import Bucket, BucketSpec, Engine, MixedPrecisionPolicy, Unit
from fullshard.frontend.checks import check_params, shard_dim
from fullshard.frontend.explain import check_optimizers_again
from fullshard.frontend.hooks import engine_of, install_forward_hooks, install_state_dict_hooks
from fullshard.frontend.meshes import DataMesh
from fullshard.frontend.module import sharded_class
from fullshard.frontend.ownership import (
    OwnedParam,
    Places,
    collect,
    enlist,
    managed,
    unit_of,
    units_below,
)
from fullshard.layout import Layout, LayoutStrategy, ParamSpec, PerParameter
from fullshard.schedule import AfterForward, UnitPolicy
from fullshard.tensors import DTensorForm, RaggedShard, RaggedTensor, ShardForm, draw_whole_on

__all__ = ["Choices", "Plan", "plan_unit", "shard_modules"]

log = logging.getLogger("fullshard")

_ALIGN_NBYTES = 16


@dataclass(frozen=True)
class Choices:
    """What the user chose in a call, checked."""

    mesh: DataMesh
    after_forward: AfterForward
    secondary: int | None
    """Ranks that gather again in backward, if fewer than all."""
    policy: MixedPrecisionPolicy
    ignored: set[nn.Parameter]
    placement_fn: Callable[[nn.Parameter], Any] | None
    layout: LayoutStrategy


@dataclass(frozen=True)
class Plan:
    """The buckets of a unit, before anything is made."""

    specs: list[BucketSpec]
    params: list[list[OwnedParam]]


def plan_unit(modules: Sequence[nn.Module], choices: Choices) -> Plan:
    """What ``shard_modules`` would make of ``modules``; raises whatever is wrong with them."""
    for unit in units_below(modules):
        engine_of(unit).check_idle("fully_shard")
    owned = collect(modules, choices.ignored)
    check_params(owned, choices.layout)
    return _plan(owned, choices, device_of(choices.mesh.mesh))


def shard_modules(modules: Sequence[nn.Module], choices: Choices) -> Unit:
    """Make ``modules`` one unit."""
    plan = plan_unit(modules, choices)
    below = units_below(modules)
    device = device_of(choices.mesh.mesh)
    buckets = [
        Bucket(spec, [p.param for p in params])
        for spec, params in zip(plan.specs, plan.params, strict=True)
    ]
    places = Places([[p.places for p in params] for params in plan.params])
    unit = Unit(
        "",
        buckets,
        places,
        device=device,
        num_members=len(modules),
        encloses=bool(below),
    )
    _move_buffers(modules, device)
    Engine.join((engine_of(u) for u in below), unit, UnitPolicy(choices.after_forward))
    places.show_sharded(buckets)
    draw_whole_on(choices.mesh.mesh)
    install_forward_hooks(unit, modules, choices.policy)
    install_state_dict_hooks(unit, places)
    for module in modules:
        module.__class__ = sharded_class(type(module))
    for module in managed(modules):
        # What Dynamo looks at to treat a module as sharded.
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        module._fsdp_use_orig_params = True  # type: ignore[assignment]
    check_optimizers_again()
    enlist(modules, chain.from_iterable(plan.params), unit)
    _name_units(modules, unit)
    _log(unit, modules)
    return unit


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )


def _plan(owned: Sequence[OwnedParam], choices: Choices, device: torch.device) -> Plan:
    """Parameters of one dtype and trainability share a bucket."""
    place = choices.placement_fn
    groups: dict[tuple[torch.dtype, bool], list[tuple[OwnedParam, ParamSpec]]] = {}
    for one in owned:
        dim = shard_dim(one, place(one.param)) if place else 0
        spec = ParamSpec(one.name, tuple(one.param.shape), shard_dim=dim)
        groups.setdefault((one.param.dtype, one.param.requires_grad), []).append((one, spec))
    plan = Plan([], [])
    for (dtype, _), members in groups.items():
        plan.params.append([one for one, _ in members])
        plan.specs.append(_bucket_spec([spec for _, spec in members], dtype, choices, device))
    return plan


def _bucket_spec(
    specs: Sequence[ParamSpec], dtype: torch.dtype, choices: Choices, device: torch.device
) -> BucketSpec:
    policy = choices.policy if dtype.is_floating_point else MixedPrecisionPolicy()
    mesh = choices.mesh
    comm = mesh.shards
    narrowest = min(d.itemsize for d in (dtype, policy.param_dtype, policy.reduce_dtype) if d)
    layout = choices.layout.build(specs, comm.world, max(1, _ALIGN_NBYTES // narrowest))
    return BucketSpec(
        layout=layout,
        comm=comm,
        form=_form(layout, choices),
        device=device,
        replicas=mesh.replicas,
        secondary=mesh.secondary(choices.secondary) if choices.secondary else None,
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
    )


def _form(layout: Layout, choices: Choices) -> ShardForm:
    """How users see the pieces."""
    shapes = [torch.Size(spec.shape) for spec in layout.params]
    mesh = choices.mesh
    if isinstance(choices.layout, PerParameter):
        placements = [mesh.placements(Shard(spec.shard_dim)) for spec in layout.params]
        return DTensorForm(mesh.mesh, shapes, placements)
    cuts = [
        RaggedShard((band.num_ranks, band.segment.length) for band in bands)
        for bands in layout.bands
    ]
    return DTensorForm(mesh.mesh, shapes, list(map(mesh.placements, cuts)), RaggedTensor)


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for module in managed(modules):
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _name_units(modules: Sequence[nn.Module], unit: Unit) -> None:
    """Name all units of the tree relative to its new top."""
    for root in modules:
        for name, module in root.named_modules():
            inner = unit_of(module)
            if inner is not None and inner is not unit:
                inner.name = name if len(modules) == 1 else f"{type(root).__name__}.{name}"
    if len(modules) > 1:
        unit.name = ", ".join(type(module).__name__ for module in modules)


def _log(unit: Unit, modules: Iterable[nn.Module]) -> None:
    numel = sum(p.numel for b in unit.buckets for p in b.spec.layout.params)
    shard = sum(b.shard.numel() * b.shard.element_size() for b in unit.buckets)
    log.info(
        "unit %s: %d parameters, %d elements in %d bucket(s), %d bytes a rank",
        " + ".join(type(module).__name__ for module in modules),
        unit.num_params,
        numel,
        len(unit.buckets),
        shard,
    )
