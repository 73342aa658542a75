"""Gradients of earlier passes, which wait to be reduced to the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard.engine.reduce_input import Reduced


class Partial(NamedTuple):
    """A row that is reduced over shards only, and waits for the replicas."""

    reduced: Reduced
    row: Tensor
    present: list[bool]
    """Which of these parameters had a gradient on this rank, in some pass."""


@dataclass
class Waiting:
    """Gradients of earlier passes, which a bucket keeps until a backward reduces them."""

    pending: list[Tensor | None] | None = None
    """Whole gradients, by parameter; None on all ranks if there are none on any."""
    partial: Partial | None = None
    """The sum over shards, which has not been reduced over replicas."""
    owed: frozenset[int] = frozenset()
    """Numbers of all parameters that either may have come from; the same on all ranks."""

    def __bool__(self) -> bool:
        return self.pending is not None or self.partial is not None

    def clear(self) -> None:
        """Forget all of them."""
        self.pending, self.partial, self.owed = None, None, frozenset()

    def move(self, device: torch.device, reduced: torch.dtype) -> None:
        """Bring them to where and in what dtype the bucket reduces by now."""
        if self.pending is not None:
            self.pending = [None if grad is None else grad.to(device) for grad in self.pending]
        if self.partial is not None:
            self.partial = self.partial._replace(row=self.partial.row.to(device, reduced))
