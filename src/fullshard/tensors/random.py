"""Random initialisation of sharded parameters that does not depend on how they are sharded.

A DTensor that is filled at random draws each rank's part for itself: ranks that were seeded alike,
as they should be, draw the same numbers for different parts, and another world size draws others.
On the meshes that fullshard uses, every rank draws the whole tensor and keeps its own part, so a
model made on the meta device starts like the unsharded model with the same seed. One whole
parameter at a time is in memory for it.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fullshard import _torch

__all__ = ["draw_whole_on"]

_OPS = (
    torch.ops.aten.uniform_.default,
    torch.ops.aten.normal_.default,
    torch.ops.aten.bernoulli_.float,
    torch.ops.aten.exponential_.default,
)
_meshes: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()


def draw_whole_on(mesh: DeviceMesh) -> None:
    """Let random fills of DTensors on ``mesh`` (1-D) draw whole tensors."""
    if not _meshes:
        for op in _OPS:
            _torch.handle_dtensor_op(op, _fill)
    _meshes.add(mesh)


def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    target = cast("DTensor", args[0])
    if target.device_mesh not in _meshes or target.is_meta:
        return _torch.default_dtensor_op(op, args, kwargs)
    whole = torch.empty(target.shape, dtype=target.dtype, device=_torch.local_of(target).device)
    op(whole, *args[1:], **kwargs)
    _torch.local_of(target).copy_(_own_part(whole, target))
    return target


def _own_part(whole: Tensor, like: DTensor) -> Tensor:
    """What this rank keeps of ``whole``, if it is placed as ``like`` is."""
    (placement,) = like.placements
    if not isinstance(placement, Shard):
        return whole
    mesh = like.device_mesh
    parts = whole.chunk(mesh.size(), placement.dim)
    rank = mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)
