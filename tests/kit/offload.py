"""Simulated copies between host and device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fullshard.engine import Offload
from fullshard.engine import spec as bucket_spec
from fullshard.engine.spec import Outbound
from fullshard.frontend import checks


@contextmanager
def a_bus(pinned: bool = True) -> Iterator[list[tuple[str, torch.dtype, int]]]:
    """Offload modules sharded in the block from the CPU to the CPU; yield the copies."""
    crossings: list[tuple[str, torch.dtype, int]] = []
    send, bring_home, host_tensor = Outbound.send, bucket_spec.bring_home, bucket_spec.host_tensor

    def sent(self: Outbound, shard: Tensor) -> None:
        send(self, shard)
        crossings.append(("to device", self._target.dtype, self._target.numel()))

    def brought(row: Tensor, dtype: torch.dtype, *more: Any) -> Tensor:
        narrow = min(row.dtype, dtype, key=lambda d: d.itemsize)
        crossings.append(("to host", narrow, row.numel()))
        return bring_home(row, dtype, *more)

    def unpinned(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        return host_tensor(numel, dtype, pinned=False)  # pinning needs an accelerator

    with (
        patch.object(checks, "checked_offload", lambda *_: Offload(pinned)),
        patch.object(Outbound, "send", sent),
        patch("fullshard.engine.reduce.bring_home", brought),
        patch.object(bucket_spec, "host_tensor", unpinned),
    ):
        yield crossings
