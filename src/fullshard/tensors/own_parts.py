"""Gather a DTensor, and read or write this rank's part."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fullshard._torch import dtensor as _dtensor
from fullshard.errors import UnsupportedError
from fullshard.tensors.parts import coordinate_in, own_part


def is_partial(tensor: DTensor) -> bool:
    """Return whether ``tensor`` has a Partial placement, a reduction that is still pending."""
    return any(placement.is_partial() for placement in tensor.placements)


def gathered(value: Any) -> Any:
    """Return the full tensor of a DTensor (a collective unless replicated), else ``value``."""
    if not isinstance(value, DTensor):
        return value
    # Inside an operation autograd is off, but ``requires_grad`` stays set. Before 2.12 this makes
    # PyTorch detach the gathered tensor in place, which DTensors of that version cannot do.
    with torch.no_grad():
        return cast("DTensor", value.detach()).full_tensor()


def own_part_of(op: Any, whole: Tensor, target: DTensor) -> Tensor:
    """Return this rank's part of ``whole``, cut by the placements of ``target``.

    Args:
        op: the operation, for the error message.
        whole: a plain tensor of the global shape of ``target``.
        target: a DTensor without Partial placements.

    Raises:
        UnsupportedError: if the local tensor of ``target`` has another shape than this part.
    """
    mesh, placements = target.device_mesh, target.placements
    part = own_part(whole, placements, mesh.shape, coordinate_in(mesh))
    held = _dtensor.local_of(target).shape
    if part.shape != held:
        raise UnsupportedError(
            f"{op}: this rank holds {tuple(held)} of a DTensor of shape {tuple(target.shape)}, "
            f"where {placements} on a mesh of shape {tuple(mesh.shape)} say {tuple(part.shape)}; "
            "fill the local tensor itself, or shard evenly"
        )
    return part


def keep_own_part(op: Any, whole: Tensor, target: DTensor) -> DTensor:
    """Write this rank's part of ``whole`` into ``target``, and return ``target``."""
    _dtensor.local_of(target).copy_(own_part_of(op, whole, target))
    return target


def replicated(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a replicated DTensor around ``whole``, which is the same on all ranks."""
    spec = _dtensor.dtensor_spec(
        mesh,
        (Replicate(),) * mesh.ndim,
        shape=whole.shape,
        stride=whole.stride(),
        dtype=whole.dtype,
    )
    return _dtensor.dtensor_from_spec(whole, spec, requires_grad=False, cls=DTensor)
