"""A model whose step fails on one rank."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import (
    FullyShardedDataParallel,
    PerParameter,
    Ragged,
)
from fullshard.comm.fault_domain import Era
from tests.ranks.models import Fuse, Trouble, fill, noise, shard_units

LAYOUTS = {"rows": PerParameter(), "ragged": Ragged()}


class Tower(nn.Module):
    """Blocks, one of which may be skipped, and one of which may fail, on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4))
        self.head = nn.Linear(6, 3, dtype=torch.float64)
        self.fault = ""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 2 and self.fault == "skip":
                continue
            x = torch.tanh(block(x))
            if number == 1 and self.fault == "forward":
                raise Trouble("in forward")
            if number == 1 and self.fault == "backward":
                x = Fuse.apply(x, Trouble)
        return self.head(x)


def tower(face: str, layout: str) -> Tower | FullyShardedDataParallel:
    model = fill(Tower(), scale=0.4)
    if face == "flat":
        for number, block in enumerate(model.blocks):
            model.blocks[number] = FullyShardedDataParallel(block, use_orig_params=True)
        return FullyShardedDataParallel(model, use_orig_params=True)
    return shard_units(model, model.blocks, layout=LAYOUTS[layout])


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    x = noise(3, 6, seed=10 * number + dist.get_rank())
    model(x).square().sum().backward()
    optimizer.step()


def wait_for_the_end_of(era: Era) -> None:
    until_s = time.monotonic() + 20.0
    while era.error is None:
        assert time.monotonic() < until_s
        time.sleep(0.01)
