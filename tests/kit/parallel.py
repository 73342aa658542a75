"""Tensor-parallel parameters and their shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard.tensors import (
    ParallelSpec,
    ShardPlace,
    parallel_spec_of,
)

SIZES = range(1, 10)


def mesh_of(names: str = "dp tp", *sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes or (2, 2), mesh_dim_names=tuple(names.split()))


def spec_of(param: Tensor, **options: Any) -> ParallelSpec:
    spec = parallel_spec_of(param, **options)
    assert spec is not None
    return spec


def rows(size: int, width: int = 3) -> Tensor:
    return torch.arange(size * width, dtype=torch.float64).view(size, width)


def chunk(tensor: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return this rank's part of ``torch.chunk`` over the last mesh dim, which may be empty."""
    parts = tensor.chunk(mesh.shape[-1], dim)
    rank = mesh.get_local_rank(mesh.ndim - 1)
    return parts[rank] if rank < len(parts) else tensor.narrow(dim, 0, 0)


def shown(local: Tensor, place: ShardPlace, like: Tensor) -> DTensor:
    """Return a shard as a DTensor."""
    return DTensor.from_local(
        local.contiguous(),
        place.mesh,
        place.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
