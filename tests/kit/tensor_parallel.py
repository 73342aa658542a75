"""A model for tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    Replicate,
    Shard,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from tests.ranks.models import shard_units

STEPS, LENGTH, VOCAB = 4, 4, 13


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A model whose ``gain`` is never a DTensor, with a frozen block and odd sizes."""

    def __init__(self, dim: int = 6, hidden: int = 10, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB + 1, dim)
        self.gain = nn.Parameter(torch.ones(dim))
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(dim, VOCAB + 1, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * 1.0) * self.scale()

    def scale(self) -> Tensor:
        return self.gain.mean()


BLOCK_PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),  # or torch miscounts
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


def parallelize(model: Net, tp: DeviceMesh) -> None:
    """Use sequence parallelism between the linear layers, so norms get partial gradients."""
    is_tied = model.head.weight is model.embed.weight
    parallelize_module(
        model,
        tp,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    if is_tied:
        model.head.weight = model.embed.weight
    for block in model.blocks:
        parallelize_module(block, tp, BLOCK_PLAN)
    model.blocks[1].requires_grad_(False)  # SequenceParallel unfreezes


def shard(model: Net, fully_shard: Callable[..., Any], **options: Any) -> None:
    shard_units(model, model.blocks, by=fully_shard, **options)
