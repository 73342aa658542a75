"""The way over the bus, for shards that live in the memory of the host.

Everything is cast first and crosses in one copy a bucket: shards in the dtype of the all-gather,
gradients in that of the reduction if it is the narrower one. The host reads a shard when the copy
is issued, into memory of the copy's own, so an optimizer may write to the shard right after.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullshard.device import Lanes, Mark, host_tensor


@dataclass(frozen=True)
class Offload:
    """That shards, gradients and so the optimizer are on the CPU."""

    pinned: bool
    """Whether copies go through pinned memory; if not, each one blocks the host."""


class Outbound:
    """From a shard on the host to ``target`` on the device, of the dtype that is to travel."""

    def __init__(self, offload: Offload, target: Tensor, lanes: Lanes) -> None:
        self._offload = offload
        self._target = target
        self._lanes = lanes
        self._host: Tensor | None = None
        self._sent: Mark | None = None

    def send(self, shard: Tensor) -> None:
        """Issue the copy on the lane that is current."""
        target = self._target
        if not self._offload.pinned:
            target.copy_(shard.to(target.dtype))
            return
        if self._sent is not None:
            self._sent.synchronize()  # the copy of last time, over long ago
        if self._host is None:
            self._host = host_tensor(target.numel(), target.dtype, pinned=True)
        self._host.copy_(shard)
        target.copy_(self._host, non_blocking=True)
        self._sent = self._lanes.mark()


def bring_home(row: Tensor, dtype: torch.dtype, offload: Offload, lanes: Lanes) -> Tensor:
    """``row``, 1-D on the device, as a tensor of ``dtype`` on the host, which waits for it.

    It waits for a reduction that began two units ago: what computes meanwhile was issued before.
    """
    on_bus = row.to(dtype) if dtype.itemsize < row.itemsize else row
    host = host_tensor(row.numel(), on_bus.dtype, pinned=offload.pinned)
    host.copy_(on_bus, non_blocking=True)
    lanes.mark().synchronize()
    return host.to(dtype)
