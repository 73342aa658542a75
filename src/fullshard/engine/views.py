"""Views that follow from a ``GatherPlan``: the targets of a gather, and copies out of staging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fullshard.layout import GatherPlan, Layout, StridedCopy, plan_gather

_DIRECT_NBYTES = 512 << 10
"""Size from which pieces of a parameter are gathered in place, if the layout allows that.

Each such piece travels alone. Smaller pieces travel together: a copy takes less time with gloo.
"""


def gather_plan(layout: Layout, itemsize: int) -> GatherPlan:
    """Return the plan by which shards with elements of ``itemsize`` bytes are gathered."""
    return plan_gather(layout, min_numel=_DIRECT_NBYTES // itemsize)


def written_in_place(plan: GatherPlan, world: int, whole: Tensor) -> list[Tensor]:
    """Return the parts of ``whole``, 1-D, that gathers write directly."""
    return [whole.narrow(0, part.unsharded_offset, world * part.numel) for part in plan.direct]


def places_of_copies(
    copies: Sequence[StridedCopy],
    whole: Tensor,
    staging: Tensor,
    offsets: Sequence[int] | Mapping[int, int],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return views of ``whole``, the targets of copies, and views of ``staging``, the sources.

    ``offsets`` are the offsets of the parameters in ``whole``, in elements.
    """
    to = [
        whole.as_strided(box.sizes, box.param_strides, offsets[box.param] + box.param_offset)
        for box in copies
    ]
    of = [staging.as_strided(box.sizes, box.staging_strides, box.staging_offset) for box in copies]
    return to, of
