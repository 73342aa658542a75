"""Models under ``FullyShardedDataParallel``, and a training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from tests.ranks.net import Net, batch


def wrap(model: Net, **options: Any) -> FSDP:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FSDP(block, **options)
    return FSDP(model, **options)


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


originals = pytest.mark.parametrize("original", [True, False], ids=["originals", "flat"])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    model(batch(number)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
