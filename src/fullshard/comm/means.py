"""Means of what has arrived, whatever brought it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fullshard.comm.protocol import Pending

__all__ = ["Divided", "put_mean"]


def put_mean(output: Tensor, own: Tensor, others: Sequence[Tensor]) -> None:
    """Write the mean of ``own`` and ``others`` into ``output``; sums are in fp32 or wider."""
    wide = torch.promote_types(own.dtype, torch.float32)
    in_place = output.dtype == wide  # else add up in wide numbers, round once
    total = output if in_place else torch.empty_like(own, dtype=wide)
    if own.dtype == wide:
        torch.add(own, others[0], out=total)
    else:
        total.copy_(own).add_(others[0])
    for part in others[1:]:
        total.add_(part)
    total.div_(1 + len(others))
    if not in_place:
        output.copy_(total)


class Divided:
    """A sum on its way, to be made a mean."""

    def __init__(self, pending: Pending, values: Tensor, world: int) -> None:
        self._pending = pending
        self._values = values
        self._world = world

    def wait(self) -> None:
        """Make the mean usable."""
        self._pending.wait()
        self._values.div_(self._world)
