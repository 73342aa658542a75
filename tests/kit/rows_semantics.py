"""Modules for comparisons with FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.ranks.models import fill


def linears(num: int, dim: int = 3) -> Any:
    return fill(nn.Sequential(*(nn.Linear(dim, dim) for _ in range(num))).double())


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)
        self.extra = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x)
