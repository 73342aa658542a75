"""A small model whose root unit owns parameters at the top, in the middle and at the end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.ranks.models import fill, full_parameters, noise, shard_units


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.plain = nn.Sequential(nn.Linear(6, 7), nn.Tanh())
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x * self.scale))
        return self.head(self.plain(x))


def make(dtype: torch.dtype = torch.float64, seed_scale: float = 0.4) -> Net:
    return fill(Net().to(dtype), scale=seed_scale)


def shard(model: Net, **options: Any) -> Net:
    return shard_units(model, model.blocks, **options)


def batch(number: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return batch ``number``, the same on every rank."""
    return noise(4, 6, seed=50 + number, dtype=dtype)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> float:
    """Run one training step; return the loss."""
    dtype = next(model.parameters()).dtype
    loss = model(batch(number, dtype)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train_both(script: Callable[[nn.Module], None], **options: Any) -> float:
    """Run ``script`` on the unsharded and the sharded model; return how far apart they end."""
    plain = make()
    model = shard(copy.deepcopy(plain), **options)
    script(plain)
    script(model)
    return apart(model, plain)


def apart(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference between the full parameters of two models."""
    a, b = full_parameters(one), full_parameters(other)
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in b)
