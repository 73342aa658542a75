"""Copies of many tensors, in as few kernels as the device allows.

On a CPU a batched copy runs one tensor after the other. On CUDA it is one kernel if all tensors are
dense, each with the strides of its counterpart, and each of the two lists has one dtype. A single
tensor that breaks these rules makes CUDA copy one tensor after the other as well.

A ``GatherPlan`` decides which views are copied: the targets of a gather, and copies out of staging.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fullshard._torch import device as _device
from fullshard.layout import GatherPlan, Layout, StridedCopy, plan_gather

MOST_DENSE = 64
"""Number of tensors that every build of PyTorch copies in one kernel; later builds take more."""


def copy_all(places: list[Tensor], sources: list[Tensor]) -> None:
    """Copy ``sources`` to ``places``, with a cast; one device, and one shape per pair."""
    if not places:
        return
    if not _device.fuses_copies(places[0].device):
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


_DIRECT_NBYTES = 512 << 10
"""Size from which pieces of a parameter are gathered in place, if the layout allows that.

Each such piece travels alone. Smaller pieces travel together: a copy takes less time with gloo.
"""


def gather_plan(layout: Layout, itemsize: int) -> GatherPlan:
    """Return the plan by which shards with elements of ``itemsize`` bytes are gathered."""
    return plan_gather(layout, min_numel=_DIRECT_NBYTES // itemsize)


def written_in_place(plan: GatherPlan, world: int, unsharded: Tensor) -> list[Tensor]:
    """Return the parts of ``unsharded``, 1-D, that gathers write directly."""
    return [unsharded.narrow(0, part.unsharded_offset, world * part.numel) for part in plan.direct]


def places_of_copies(
    copies: Sequence[StridedCopy],
    unsharded: Tensor,
    staging: Tensor,
    offsets: Sequence[int] | Mapping[int, int],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return views of ``unsharded``, the targets of copies, and views of ``staging``, the sources.

    ``offsets`` are the offsets of the parameters in ``unsharded``, in elements.
    """
    to = [
        unsharded.as_strided(box.sizes, box.param_strides, offsets[box.param] + box.param_offset)
        for box in copies
    ]
    of = [staging.as_strided(box.sizes, box.staging_strides, box.staging_offset) for box in copies]
    return to, of
