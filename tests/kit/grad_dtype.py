"""Models whose gradients have their own dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import Ragged, fully_shard
from tests.ranks.models import fill, noise
from tests.versions import TORCH

layouts = pytest.mark.parametrize("layout", ["per_parameter", "ragged"])


follows = pytest.mark.skipif(TORCH < (2, 15), reason="FSDP2 asks for grad_dtype since 2.15")


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


GradDtypes = dict[str, torch.dtype | None]


class Net(nn.Module):
    """Two nested units with a frozen parameter, and a layer that may be used several times."""

    uses = 1

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.twice = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        for _ in range(self.uses):
            x = torch.tanh(self.twice(x))
        return self.head(self.norm(x) * self.frozen)


def make(dtype: torch.dtype = FP32, grad_dtypes: GradDtypes | None = None) -> Net:
    model = fill(Net().to(dtype))
    for name, param in model.named_parameters():
        if grad_dtypes and name in grad_dtypes:
            param.grad_dtype = grad_dtypes[name]
    return model


def ours(model: nn.Module, layout: str, **options: Any) -> Any:
    chosen = Ragged() if layout == "ragged" else fullshard.PerParameter()
    fully_shard(model.inner, layout=chosen, **options)
    return fully_shard(model, layout=chosen, **options)


def share(number: int) -> Tensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    return noise(4 * world, 6, seed=number, dtype=FP32).chunk(world)[rank]


def backward(model: Any, number: int) -> Tensor:
    dtype = next(p.dtype for p in model.parameters())
    loss = model(share(number).to(dtype)).float().square().mean()
    loss.backward()
    return loss.detach()


def seen(model: nn.Module) -> dict[str, Any]:
    """Return each parameter's ``grad_dtype`` and full gradient."""
    return {
        name: (
            param.grad_dtype,
            None if param.grad is None else getattr(param.grad, "full_tensor", lambda: None)(),
        )
        for name, param in model.named_parameters()
    }
