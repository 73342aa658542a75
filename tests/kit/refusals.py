"""Small models, and one step of training, for tests of refused options."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard import fully_shard
from fullshard.frontend.ownership import unit_of

HOOKS = [name for name in vars(nn.Module()) if name.endswith("hooks")]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def modules_in(given: Any) -> list[nn.Module]:
    parts = given if isinstance(given, (list, tuple)) else [given]
    return [m for part in parts if isinstance(part, nn.Module) for m in part.modules()]


def shape_of(given: Any) -> list[Any]:
    """Return all that ``fully_shard`` changes in modules, equal before and after a refusal."""
    return [
        (
            type(module),
            sorted(vars(module)),
            {name: id(param) for name, param in module._parameters.items()},
            {name: id(buffer) for name, buffer in module._buffers.items()},
            {name: len(getattr(module, name)) for name in HOOKS if hasattr(module, name)},
            [p._backward_hooks for p in module._parameters.values() if p is not None],
            unit_of(module),
        )
        for module in modules_in(given)
    ]


def train_once(module: nn.Module) -> None:
    module(torch.ones(5, 4)).sum().backward()
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)


def shard_and_train(model: nn.Module) -> None:
    fully_shard(model)
    train_once(model)
