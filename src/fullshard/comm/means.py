"""Means over ranks, independent of the transport."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.comm.protocol import Pending


def begun(values: Tensor, world: int, *, averages: bool) -> tuple[dist.ReduceOp.RedOpType, float]:
    """Return the op to reduce ``values`` with and the divisor to apply to the result afterwards.

    ``averages`` says that the backend has a mean for this dtype. A sum of many fp16 numbers
    overflows, and NCCL's mean divides first, which loses small ones. So fp16 ``values`` are divided
    here, in place, by about the square root of the number of ranks; the divisor is the rest.
    """
    if values.dtype is torch.float16:
        before = 1 << (world.bit_length() // 2)
        values.div_(before)
        return dist.ReduceOp.SUM, world / before
    return (dist.ReduceOp.AVG, 1) if averages else (dist.ReduceOp.SUM, world)


def put_mean(output: Tensor, own: Tensor, others: Sequence[Tensor]) -> None:
    """Write the mean of ``own`` and ``others`` into ``output``; sums are in fp32 or wider."""
    wide = torch.promote_types(own.dtype, torch.float32)
    in_place = output.dtype == wide  # otherwise add up in the wide dtype and round once
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
    """A pending sum that ``wait`` turns into a mean."""

    def __init__(self, pending: Pending, values: Tensor, divisor: float) -> None:
        self._pending = pending
        self._values = values
        self._divisor = divisor

    def wait(self) -> None:
        """Make the mean usable."""
        self._pending.wait()
        self._values.div_(self._divisor)
