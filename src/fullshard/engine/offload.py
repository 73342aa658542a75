"""Copies between host and device, for shards that live in host memory.

Everything is cast first and crosses in one copy per bucket: shards in the dtype of the all-gather,
gradients in the narrower of the dtypes of the reduction and of ``.grad``. The host reads a shard
into a separate buffer when the copy is issued, so an optimizer may write to the shard right after.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullshard.device import LaneEvent, Lanes, dry_host_tensor, host_tensor


@dataclass(frozen=True)
class Offload:
    """A mark of a bucket whose shards, gradients and optimizer state live on the CPU."""

    pinned: bool
    """True if copies go through pinned memory; if False, each copy blocks the host."""


class Outbound:
    """A sender of shards from the host to ``target`` on the device, in the dtype of ``target``."""

    def __init__(self, offload: Offload, target: Tensor, lanes: Lanes) -> None:
        self._offload = offload
        self._target = target
        self._lanes = lanes
        self._host: Tensor | None = None
        self._sent: LaneEvent | None = None

    def send(self, shard: Tensor) -> None:
        """Issue the copy of ``shard`` on the current lane."""
        target = self._target
        if not self._offload.pinned:
            target.copy_(shard.to(target.dtype))
            return
        if self._sent is not None:
            self._sent.synchronize()  # the previous copy, which ended long ago
        if self._host is None:
            self._host = _on_host(target, pinned=True)
        self._host.copy_(shard)
        target.copy_(self._host, non_blocking=True)
        self._sent = self._lanes.mark()


def bring_home(row: Tensor, dtype: torch.dtype, offload: Offload, lanes: Lanes) -> Tensor:
    """Return ``row``, 1-D on the device, as a tensor of ``dtype`` on the host; block the host.

    The host waits for a reduction that began two units ago; the device has work issued before.
    """
    on_bus = row.to(dtype) if dtype.itemsize < row.itemsize else row
    host = _on_host(on_bus, pinned=offload.pinned)
    host.copy_(on_bus, non_blocking=True)
    lanes.mark().synchronize()
    return host.to(dtype)


def _on_host(like: Tensor, *, pinned: bool) -> Tensor:
    """Return memory of the host for the elements of ``like``, which a dry run has on meta."""
    if like.is_meta:
        return dry_host_tensor(like.numel(), like.dtype)
    return host_tensor(like.numel(), like.dtype, pinned=pinned)
