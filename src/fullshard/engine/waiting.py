"""Waiting gradients: those of earlier passes that are not fully reduced yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard.engine.reduce_input import Reduced


class Partial(NamedTuple):
    """A row of gradients that is reduced over shards and waits for the replicas."""

    reduced: Reduced
    row: Tensor
    present: list[bool]
    """For each parameter of ``reduced``, True if this rank had a gradient in some pass."""


@dataclass
class Waiting:
    """The gradients of earlier passes that a bucket keeps until a backward reduces them."""

    pending: list[Tensor | None] | None = None
    """Whole gradients, by parameter; None on all ranks if no rank accumulated any."""
    partial: Partial | None = None
    """Gradients reduced over shards, but not over replicas."""
    owed: frozenset[int] = frozenset()
    """Numbers of all parameters that may have such gradients; the same on all ranks."""

    def __bool__(self) -> bool:
        return self.pending is not None or self.partial is not None

    def clear(self) -> None:
        """Forget all waiting gradients."""
        self.pending, self.partial, self.owed = None, None, frozenset()

    def move(self, device: torch.device, reduced: torch.dtype) -> None:
        """Move waiting gradients to ``device``; cast partial ones to the dtype ``reduced``."""
        if self.pending is not None:
            self.pending = [None if grad is None else grad.to(device) for grad in self.pending]
        if self.partial is not None:
            self.partial = self.partial._replace(row=self.partial.row.to(device, reduced))
