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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.errors import UnsupportedError
from fullshard.tensors.parts import coordinate_in, own_part

__all__ = ["draw_whole_on"]

_OPS = (
    torch.ops.aten.uniform_.default,
    torch.ops.aten.normal_.default,
    torch.ops.aten.bernoulli_.float,
    torch.ops.aten.exponential_.default,
)
_meshes: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()


def draw_whole_on(mesh: DeviceMesh) -> None:
    """Let random fills of DTensors on ``mesh``, of any dims, draw whole tensors.

    Where tensors are cut or replicated, that is; those that are partial sums are left to torch.
    All ranks must be seeded alike, those of tensor parallelism included.
    """
    if not _meshes:
        for op in _OPS:
            _torch.handle_dtensor_op(op, _fill)
    _meshes.add(mesh)


def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    target = cast("DTensor", args[0])
    mesh, placements = target.device_mesh, target.placements
    is_ours = mesh in _meshes and mesh.get_coordinate() is not None and not target.is_meta
    if not is_ours or any(placement.is_partial() for placement in placements):
        return _torch.default_dtensor_op(op, args, kwargs)
    local = _torch.local_of(target)
    whole = torch.empty(target.shape, dtype=target.dtype, device=local.device)
    op(whole, *args[1:], **kwargs)
    part = own_part(whole, placements, mesh.shape, coordinate_in(mesh))
    if part.shape != local.shape:
        raise UnsupportedError(
            f"{op}: this rank holds {tuple(local.shape)} of a DTensor of shape "
            f"{tuple(target.shape)}, where {placements} on a mesh of shape {tuple(mesh.shape)} say "
            f"{tuple(part.shape)}; fill the local tensor itself, or shard evenly"
        )
    local.copy_(part)
    return target
