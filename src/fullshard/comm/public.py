"""Collectives by the public functions of ``torch.distributed``, which users may count or replace.

Each function takes what the function of its name in ``_torch.collectives`` takes, and looks up that
of ``torch.distributed`` at each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fullshard._torch import collectives as _collectives
from fullshard.comm.protocol import Pending, WorkGroup


def all_gather(
    group: dist.ProcessGroup,
    outputs: Sequence[Tensor],
    sources: Sequence[Tensor],
    *,
    in_order: bool,
) -> Pending:
    """Start one all-gather for each tensor."""
    gather, _ = _collectives.public_collectives()
    works = [
        gather(output, source, group=group, async_op=not in_order)
        for output, source in zip(outputs, sources, strict=True)
    ]
    return WorkGroup([work for work in works if work is not None])


def reduce_scatter(
    group: dist.ProcessGroup, output: Tensor, source: Tensor, op: Any, *, in_order: bool
) -> Any:
    """Start a reduce-scatter."""
    _, reduce = _collectives.public_collectives()
    return reduce(output=output, input=source, op=op, group=group, async_op=not in_order)


def all_reduce(group: dist.ProcessGroup, values: Tensor, op: Any, *, in_order: bool) -> Any:
    """Start an all-reduce."""
    return dist.all_reduce(values, op, group=group, async_op=not in_order)


def all_to_all(
    group: dist.ProcessGroup,
    output: Tensor,
    source: Tensor,
    sizes: Sequence[int],
    lengths: Sequence[int],
    *,
    in_order: bool,
) -> Any:
    """Start an exchange of slices, equal ones if ``sizes`` and ``lengths`` are empty."""
    exchange, parts = dist.all_to_all_single, ([*sizes] or None, [*lengths] or None)
    return exchange(output, source, *parts, group=group, async_op=not in_order)
