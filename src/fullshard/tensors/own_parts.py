"""Where DTensors that fullshard made lie, and what this rank holds of them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fullshard import _torch
from fullshard.errors import UnsupportedError
from fullshard.tensors.parts import coordinate_in, own_part


def is_partial(tensor: DTensor) -> bool:
    """Whether it is a sum, or the like, that is still to be made."""
    return any(placement.is_partial() for placement in tensor.placements)


def gathered(value: Any) -> Any:
    """The whole of a DTensor, a collective of its mesh unless it is replicated; else ``value``."""
    if not isinstance(value, DTensor):
        return value
    # Inside of an operation autograd is off, but what requires gradients goes on to do so. Before
    # 2.12 that makes PyTorch detach what it gathered in place, which DTensors there cannot.
    with torch.no_grad():
        return cast("DTensor", value.detach()).full_tensor()


def own_part_of(op: Any, whole: Tensor, target: DTensor) -> Tensor:
    """This rank's part of ``whole`` where it is placed as ``target``.

    Args:
        op: for the message.
        whole: a plain tensor of the global shape of ``target``.
        target: a DTensor that is no sum still to be made.

    Raises:
        UnsupportedError: ``target`` holds another part than its placements say.
    """
    mesh, placements = target.device_mesh, target.placements
    part = own_part(whole, placements, mesh.shape, coordinate_in(mesh))
    held = _torch.local_of(target).shape
    if part.shape != held:
        raise UnsupportedError(
            f"{op}: this rank holds {tuple(held)} of a DTensor of shape {tuple(target.shape)}, "
            f"where {placements} on a mesh of shape {tuple(mesh.shape)} say {tuple(part.shape)}; "
            "fill the local tensor itself, or shard evenly"
        )
    return part


def keep_own_part(op: Any, whole: Tensor, target: DTensor) -> DTensor:
    """Write this rank's part of ``whole`` into ``target``, which is returned."""
    _torch.local_of(target).copy_(own_part_of(op, whole, target))
    return target


def replicated(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """``whole``, the same on all ranks, as a DTensor around it."""
    spec = _torch.dtensor_spec(
        mesh,
        (Replicate(),) * mesh.ndim,
        shape=whole.shape,
        stride=whole.stride(),
        dtype=whole.dtype,
    )
    return _torch.dtensor_from_spec(whole, spec, requires_grad=False, cls=DTensor)
