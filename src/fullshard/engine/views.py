"""Views by a ``GatherPlan``: where a gather writes, and what is copied out of its staging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fullshard.layout import GatherPlan, Layout, StridedCopy, plan_gather

_DIRECT_NBYTES = 512 << 10
"""Pieces of a parameter from this size on are gathered in place, where the layout allows it.

Each travels by itself then. Below, a copy of what came with others takes less time over gloo.
"""


def gather_plan(layout: Layout, itemsize: int) -> GatherPlan:
    """How shards with elements of ``itemsize`` bytes become whole."""
    return plan_gather(layout, min_numel=_DIRECT_NBYTES // itemsize)


def written_in_place(plan: GatherPlan, world: int, whole: Tensor) -> list[Tensor]:
    """The parts of ``whole``, 1-D, that gathers write themselves."""
    return [whole.narrow(0, part.unsharded_offset, world * part.numel) for part in plan.direct]


def places_of_copies(
    copies: Sequence[StridedCopy],
    whole: Tensor,
    staging: Tensor,
    offsets: Sequence[int] | Mapping[int, int],
) -> tuple[list[Tensor], list[Tensor]]:
    """Views of ``whole`` and of ``staging``, to copy the latter to the former.

    ``offsets`` are those of the parameters in ``whole``.
    """
    to = [
        whole.as_strided(box.sizes, box.param_strides, offsets[box.param] + box.param_offset)
        for box in copies
    ]
    of = [staging.as_strided(box.sizes, box.staging_strides, box.staging_offset) for box in copies]
    return to, of
