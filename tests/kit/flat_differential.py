"""The same model under ``FullyShardedDataParallel`` and under PyTorch's class."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.wrap import ModuleWrapPolicy
from tests.ranks.models import fill, noise

EXACT = 1e-12


WRAPPED = "_fsdp_wrapped_module."


BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Parameters of the root at both ends, one of them tied in two places, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.head.weight
        self.register_buffer("shift", torch.linspace(0, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        for block in self.blocks:
            x = block(x)
        return self.again(torch.tanh(self.head(x))) + self.shift


def make(dtype: torch.dtype) -> Stack:
    return fill(Stack().to(dtype), scale=0.4)


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore PyTorch's deprecation warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def wrap(kit: ModuleType, model: Stack, how: str, **options: Any) -> Any:
    """Return the model under the wrapper of ``kit``."""
    options.setdefault("device_id", torch.device("cpu"))
    with quiet():
        if how == "policy":
            options["auto_wrap_policy"] = ModuleWrapPolicy({Block})
        elif how == "nested":
            for i, block in enumerate(model.blocks):
                model.blocks[i] = kit.FullyShardedDataParallel(block, **options)
        return kit.FullyShardedDataParallel(model, **options)


def clean(name: str) -> str:
    return name.replace(WRAPPED, "")


def full_values(kit: ModuleType, model: Any) -> dict[str, Tensor]:
    with quiet(), kit.FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {clean(n): p.detach().clone() for n, p in model.named_parameters()}


def batch(number: int, dtype: torch.dtype) -> Tensor:
    return noise(4, 6, seed=900 + 10 * number + dist.get_rank(), dtype=dtype)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    model: Any,
    script: tuple[str, ...],
    dtype: torch.dtype,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    optimizer = optimizer or optimizer_of(model)
    losses, number = [], 0
    for micro in script:
        for kind in micro:
            with quiet(), model.no_sync() if kind == "n" else nullcontext():
                loss = model(batch(number, dtype)).float().square().mean()
                loss.backward()
            losses.append(loss.item())
            number += 1
        optimizer.step()
        optimizer.zero_grad()
    return losses
