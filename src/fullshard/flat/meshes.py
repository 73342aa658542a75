"""Choose the mesh of a wrapper from its strategy and its process groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.comm import default_mesh, mesh_of_group, mesh_of_groups, mesh_of_nodes
from fullshard.errors import ArgumentTypeError, ConfigError
from fullshard.flat.options import ShardingStrategy
from fullshard.frontend.meshes import DataMesh


def data_mesh_of(
    strategy: ShardingStrategy,
    process_group: Any,
    device_mesh: Any,
    device: torch.device | None,
    *,
    wraps_children: bool,
) -> DataMesh:
    """Return the mesh for ``strategy``, with the dims that shard and replicate.

    If only one rank would shard a copy, ranks replicate. ``device`` is that of ``device_id``.

    Raises:
        ConfigError: if group and mesh are both given, or a needed one is missing or misshapen.
        ArgumentTypeError: if they are not process groups or not a mesh.
    """
    if process_group is not None and device_mesh is not None:
        raise ConfigError(
            "FullyShardedDataParallel: got process_group and device_mesh; give one of them"
        )
    device_type = None if device is None else device.type
    if strategy.is_hybrid:
        mesh = _hybrid(strategy, process_group, device_mesh, device_type, wraps_children)
        alone = mesh.size(1) == 1
        return DataMesh(mesh, shard_dim=None if alone else 1, replicate_dim=0)
    mesh = _one_dim(strategy, process_group, device_mesh, device_type)
    if strategy is ShardingStrategy.NO_SHARD or mesh.size() == 1:
        return DataMesh(mesh, shard_dim=None, replicate_dim=0)
    return DataMesh(mesh)


def _one_dim(
    strategy: ShardingStrategy, process_group: Any, device_mesh: Any, device_type: str | None
) -> DeviceMesh:
    if device_mesh is not None:
        return _checked(device_mesh, strategy, ndim=1)
    if process_group is None:
        return default_mesh(device_type)
    return mesh_of_group(_group(process_group, strategy), device_type)


def _hybrid(
    strategy: ShardingStrategy,
    process_group: Any,
    device_mesh: Any,
    device_type: str | None,
    wraps_children: bool,
) -> DeviceMesh:
    if device_mesh is not None:
        return _checked(device_mesh, strategy, ndim=2)
    if process_group is not None:
        if not isinstance(process_group, (tuple, list)) or len(process_group) != 2:
            raise ConfigError(
                f"FullyShardedDataParallel: Expected process_group to be passed in as a tuple "
                f"(groups that share a copy, groups that hold the same) with {strategy.name}, got "
                f"{process_group!r}"
            )
        shards, replicas = (_group(group, strategy) for group in process_group)
        return mesh_of_groups(shards, replicas, device_type)
    if not wraps_children:
        raise ConfigError(
            f"FullyShardedDataParallel: {strategy.name} requires explicit specification of process "
            "group or device_mesh, or an auto_wrap_policy, so that all units get the same"
        )
    default_mesh(device_type)  # makes the default process group if there is none
    return mesh_of_nodes(device_type)


def _checked(mesh: Any, strategy: ShardingStrategy, *, ndim: int) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(
            f"FullyShardedDataParallel(device_mesh=...): got {type(mesh).__name__}, expected a "
            "DeviceMesh"
        )
    if mesh.ndim != ndim:
        raise ConfigError(
            f"FullyShardedDataParallel: got a device_mesh of {mesh.ndim} dims, expected {ndim} "
            f"with {strategy.name}"
        )
    return mesh


def _group(group: Any, strategy: ShardingStrategy) -> dist.ProcessGroup:
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentTypeError(
            f"FullyShardedDataParallel(process_group=...): got {type(group).__name__}, expected a "
            f"process group with {strategy.name}"
        )
    return group
