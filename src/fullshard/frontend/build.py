"""From modules and choices to a unit: decide everything, then change the modules at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard.comm import Collectives, collectives_of
from fullshard.engine import Bucket, BucketSpec, Engine, MixedPrecisionPolicy, Unit
from fullshard.frontend.checks import check_params, shard_dim
from fullshard.frontend.hooks import engine_of, install_forward_hooks, install_state_dict_hooks
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
from fullshard.layout import LayoutStrategy, ParamSpec, PerParameter
from fullshard.schedule import AfterForward, UnitPolicy
from fullshard.tensors import DTensorForm, LocalForm, ShardForm, draw_whole_on

__all__ = ["shard_modules"]

log = logging.getLogger("fullshard")

_ALIGN_NBYTES = 16


@dataclass(frozen=True)
class _Plan:
    """The buckets of a unit, before anything is made."""

    specs: list[BucketSpec]
    params: list[list[OwnedParam]]


def shard_modules(
    modules: Sequence[nn.Module],
    *,
    mesh: DeviceMesh,
    after_forward: AfterForward,
    policy: MixedPrecisionPolicy,
    ignored: set[nn.Parameter],
    placement_fn: Callable[[nn.Parameter], Any] | None,
    layout: LayoutStrategy,
) -> Unit:
    """Make ``modules`` one unit."""
    below = units_below(modules)
    for unit in below:
        engine_of(unit).check_idle("fully_shard")
    owned = collect(modules, ignored)
    check_params(owned)
    dims = [shard_dim(p, placement_fn(p.param) if placement_fn else None) for p in owned]
    device = device_of(mesh)
    plan = _plan(owned, dims, layout, mesh, device, policy)
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
    Engine.join((engine_of(u) for u in below), unit, UnitPolicy(after_forward))
    places.show_sharded(buckets)
    draw_whole_on(mesh)
    install_forward_hooks(unit, modules, policy)
    install_state_dict_hooks(unit, places)
    for module in modules:
        module.__class__ = sharded_class(type(module))
    for module in managed(modules):
        # What Dynamo looks at to treat a module as sharded.
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        module._fsdp_use_orig_params = True  # type: ignore[assignment]
    enlist(modules, owned, unit)
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


def _plan(
    owned: Sequence[OwnedParam],
    dims: Sequence[int],
    layout: LayoutStrategy,
    mesh: DeviceMesh,
    device: torch.device,
    policy: MixedPrecisionPolicy,
) -> _Plan:
    comm = collectives_of(mesh)
    plan = _Plan([], [])
    groups: dict[tuple[torch.dtype, bool], list[int]] = {}
    for index, one in enumerate(owned):
        groups.setdefault((one.param.dtype, one.param.requires_grad), []).append(index)
    for (dtype, _), members in groups.items():
        params = [owned[i] for i in members]
        specs = [
            ParamSpec(owned[i].name, tuple(owned[i].param.shape), shard_dim=dims[i])
            for i in members
        ]
        plan.params.append(params)
        plan.specs.append(_bucket_spec(specs, layout, mesh, comm, device, policy, dtype))
    return plan


def _bucket_spec(
    specs: Sequence[ParamSpec],
    layout: LayoutStrategy,
    mesh: DeviceMesh,
    comm: Collectives,
    device: torch.device,
    policy: MixedPrecisionPolicy,
    dtype: torch.dtype,
) -> BucketSpec:
    floating = dtype.is_floating_point
    dtypes = {dtype}
    if floating:
        dtypes |= {d for d in (policy.param_dtype, policy.reduce_dtype) if d}
    align = max(1, _ALIGN_NBYTES // min(d.itemsize for d in dtypes))
    return BucketSpec(
        layout=layout.build(specs, comm.world, align),
        comm=comm,
        form=_form(specs, layout, mesh),
        device=device,
        param_dtype=policy.param_dtype if floating else None,
        reduce_dtype=policy.reduce_dtype if floating else None,
    )


def _form(specs: Sequence[ParamSpec], layout: LayoutStrategy, mesh: DeviceMesh) -> ShardForm:
    if not isinstance(layout, PerParameter):
        return LocalForm()
    return DTensorForm(
        mesh,
        [torch.Size(spec.shape) for spec in specs],
        [(Shard(spec.shard_dim),) for spec in specs],
    )


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
