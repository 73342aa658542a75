"""Gather a DTensor, and read or write this rank's part."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fullshard._torch import dtensor as _dtensor
from fullshard.errors import ConfigError, UnsupportedError
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


class _OtherCut(UnsupportedError, ConfigError):
    """The error for a local tensor that is cut in another way than its placements say."""


def part_like(whole: Tensor, like: DTensor, op: object = "load") -> Tensor:
    """Return this rank's part of ``whole``, cut by the placements of ``like``; no communication.

    Args:
        whole: a plain tensor of the global shape of ``like``.
        like: a DTensor without Partial placements, ragged or not.
        op: the operation, for the error message.

    Raises:
        UnsupportedError, ConfigError: the local tensor of ``like`` has another shape than this
            part (both).
    """
    mesh, placements = like.device_mesh, like.placements
    part = own_part(whole, placements, mesh.shape, coordinate_in(mesh))
    held = _dtensor.local_of(like).shape
    if part.shape != held:
        raise _OtherCut(
            f"{op}: this rank holds {tuple(held)} of a DTensor of shape {tuple(like.shape)}, "
            f"where {placements} on a mesh of shape {tuple(mesh.shape)} say {tuple(part.shape)}; "
            "fill the local tensor itself, save and load it sharded, or shard evenly"
        )
    return part


def keep_own_part(op: Any, whole: Tensor, target: DTensor) -> DTensor:
    """Write this rank's part of ``whole`` into ``target``, and return ``target``."""
    _dtensor.local_of(target).copy_(part_like(whole, target, op))
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
