"""Shards a model as its ``Sharding`` says, and makes its optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from fullshard import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    OffloadPolicy,
    PerParameter,
    Ragged,
    ShardingStrategy,
    fully_shard,
)
from fullshard.optim import ShardedOptimizer
from tests.fuzz.case import Sharding
from tests.fuzz.modules import Block, blocks_of

_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def forget_meshes() -> None:
    """Drop the cached meshes, whose process groups end with the job."""
    _meshes.clear()


def _mesh(shape: tuple[int, ...]) -> DeviceMesh | None:
    if not shape:
        return None
    if shape not in _meshes:
        names = ("replicate", "shard")[-len(shape) :]
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[shape]


def shard(model: Block, sharding: Sharding) -> nn.Module:
    """Shard a model; return the model, or the wrapper around it."""
    if sharding.face == "modules":
        return _fully_sharded(model, sharding)
    return _wrapped(model, sharding)


def _fully_sharded(model: Block, sharding: Sharding) -> nn.Module:
    blocks = blocks_of(model)
    options = sharding.options
    for unit in sharding.units:
        modules = [blocks[number] for number in unit.nodes]
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=_mesh(sharding.mesh),
            reshard_after_forward=unit.reshard,
            offload_policy=CPUOffloadPolicy() if options.get("offload") else OffloadPolicy(),
            layout=PerParameter() if unit.layout == "param" else Ragged(unit.layout),
            shard_placement_fn=_on_last_dim if unit.dim else None,
        )
    if "budget" in options:
        assert isinstance(model, FSDPModule)
        model.set_prefetch_budget(options["budget"])
    return model


def _on_last_dim(param: nn.Parameter) -> Shard | None:
    return Shard(param.dim() - 1) if param.dim() > 1 else None


def _wrapped(model: Block, sharding: Sharding) -> nn.Module:
    options = dict(sharding.options)
    if options.get("backward_prefetch"):
        options["backward_prefetch"] = BackwardPrefetch[options["backward_prefetch"]]
    options |= {
        "use_orig_params": sharding.face == "originals",
        "sharding_strategy": ShardingStrategy[sharding.strategy],
        "device_mesh": _mesh(sharding.mesh),
        "device_id": torch.device("cpu"),
    }
    blocks = blocks_of(model)
    for unit in sharding.units:
        (number,) = unit.nodes
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* becomes NO_SHARD")
            wrapper = FullyShardedDataParallel(blocks[number], **options)
        if blocks[number] is model:
            return wrapper
        for block in blocks.values():
            for place, child in enumerate(block.inner):
                if child is blocks[number]:
                    block.inner[place] = wrapper
    raise AssertionError("the last unit is the root")


def make_optimizer(
    params: Iterable[tuple[str, nn.Parameter]], chosen: tuple[str, dict[str, Any]], *, plain: bool
) -> torch.optim.Optimizer:
    """Return the optimizer of a case; ``plain``: never a ``ShardedOptimizer``."""
    name, options = chosen[0], dict(chosen[1])
    groups: list[dict[str, Any]] = [{"params": [p for _, p in params]}]
    if options.pop("split", False):
        all_params = groups[0]["params"]
        groups = [
            {"params": part, "lr": options["lr"] * factor}
            for part, factor in ((all_params[::2], 1), (all_params[1::2], 0.5))
            if part
        ]
    is_sharded = name.startswith("Sharded")
    cls = getattr(torch.optim, name.removeprefix("Sharded"))
    if is_sharded and not plain:
        return ShardedOptimizer(groups, cls, **options)
    return cls(groups, **options)
