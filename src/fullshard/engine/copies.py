"""Copies of many tensors, in as few kernels as a device has for them.

On a CPU a batched copy is one after the other. On CUDA it is one kernel where every tensor is
dense and the other side has its strides and, list by list, one dtype; else it is one after the
other as well, for the sake of a single one that is not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullshard import _torch

MOST_DENSE = 64
"""Tensors that every build of PyTorch copies in one kernel; later ones take more."""


def copy_all(places: list[Tensor], sources: list[Tensor]) -> None:
    """Copy ``sources`` to ``places``, all of one device, each pair of one shape; cast."""
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
