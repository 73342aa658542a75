"""Optimizer steps that an exception leaves."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.optim import Muon, OwnedOptimizer, ShardedOptimizer
from tests.ranks.models import Trouble, noise


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def sharded(model: Any) -> torch.optim.Optimizer:
    return ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)


def owned(model: Any) -> torch.optim.Optimizer:
    return OwnedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)


def muon(model: Any) -> torch.optim.Optimizer:
    return Muon(model, lr=0.05, ns_dtype=torch.float64)


def batch(number: int) -> Tensor:
    return noise(3, 6, seed=10 * number + dist.get_rank())


def compute(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(batch(number)).square().sum().backward()


def fail(optimizer: torch.optim.Optimizer, *, after: bool) -> None:
    """Leave a step by an exception, before or ``after`` all weights of this rank have changed."""

    def trouble(*_: Any) -> None:
        raise Trouble("out of memory, say")

    hook = optimizer.register_step_post_hook if after else optimizer.register_step_pre_hook
    handle = hook(trouble)
    try:
        optimizer.step()
    finally:
        handle.remove()


def trained(model: Any, optimizer: torch.optim.Optimizer, numbers: tuple[int, ...]) -> None:
    for number in numbers:
        compute(model, optimizer, number)
        optimizer.step()


def equals(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
