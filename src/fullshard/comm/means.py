"""Means over ranks, independent of the transport."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


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


def put_mean(
    output: Tensor, own: Tensor, others: Sequence[Tensor], *, terms: int | None = None
) -> None:
    """Write the mean of ``own`` and ``others`` into ``output``; sums are in fp32 or wider.

    Some of ``others`` may be sums already; then ``terms`` is the number of terms in all.
    """
    wide = wide_dtype(own.dtype)
    in_place = output.dtype == wide  # otherwise add up in the wide dtype and round once
    total = output if in_place else torch.empty_like(own, dtype=wide)
    put_sum(total, own, others)
    total.div_(terms or 1 + len(others))
    if not in_place:
        output.copy_(total)


def put_sum(total: Tensor, own: Tensor, others: Sequence[Tensor]) -> None:
    """Write the sum of ``own`` and ``others`` into ``total``, of their wide dtype."""
    if others and own.dtype == total.dtype:
        torch.add(own, others[0], out=total)
        others = others[1:]
    else:
        total.copy_(own)
    for part in others:
        total.add_(part)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to add up numbers of ``dtype`` in: fp32 or wider."""
    return torch.promote_types(dtype, torch.float32)
