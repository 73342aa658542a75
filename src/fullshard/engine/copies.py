"""Copies of many tensors, in as few kernels as the device allows.

On a CPU a batched copy runs one tensor after the other. On CUDA it is one kernel if all tensors are
dense, each with the strides of its counterpart, and each of the two lists has one dtype; a single
tensor that breaks this makes CUDA copy one tensor after the other as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullshard import _torch

MOST_DENSE = 64
"""Number of tensors that every build of PyTorch copies in one kernel; later builds take more."""


def copy_all(places: list[Tensor], sources: list[Tensor]) -> None:
    """Copy ``sources`` to ``places``, with a cast; one device, and one shape per pair."""
    if not places:
        return
    if not _torch.fuses_copies(places[0].device):
        torch._foreach_copy_(places, sources)
        return
    dense: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for place, source in zip(places, sources, strict=True):
        if place.is_contiguous() and source.is_contiguous():
            to, of = dense.setdefault((place.dtype, source.dtype), ([], []))
            to.append(place)
            of.append(source)
        else:
            place.copy_(source)
    for to, of in dense.values():
        if len(to) > 1:
            torch._foreach_copy_(to, of)
        else:
            to[0].copy_(of[0])
