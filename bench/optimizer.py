"""Optimizer and clipping alone, on 2,000 small parameters, two gloo ranks of one thread each.

After that, ``Muon``: see ``bench/muon.py``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from bench import muon
from bench.compare import in_turns, medians, on_ranks, verdict
from bench.contenders import CONTENDERS, FSDP2, PER_PARAMETER, RAGGED
from bench.machine import idle, table

WORLD = 2
WARM_UP, ROUNDS = 3, 20
NAMES = (FSDP2, PER_PARAMETER, "per-parameter, ShardedOptimizer", RAGGED)
BOUNDS = {RAGGED: 0.10, "per-parameter, ShardedOptimizer": 0.12}


class Block(nn.Module):
    """Ten small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 16) to the same."""
        return x + torch.tanh(self.layers(x))


class Many(nn.Module):
    """2,000 parameters in 200 units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(200))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 16) to a loss."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def step(
    clip: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor
) -> float:
    """Take a training step; return the seconds of clipping and of the optimizer."""
    model(x).backward()
    params = list(model.parameters())
    dist.barrier()
    start = time.perf_counter()
    clip(params, 1.0)
    optimizer.step()
    taken = time.perf_counter() - start
    optimizer.zero_grad()
    return taken


def work() -> dict[str, float]:
    """Return the median seconds of every contender on this rank."""
    torch.manual_seed(0)
    base = Many()
    runs = {name: CONTENDERS[name].make(copy.deepcopy(base)) for name in NAMES}
    clips: dict[str, Callable[..., Any]] = dict.fromkeys(NAMES, fullshard.optim.clip_grad_norm_)
    clips[FSDP2] = nn.utils.clip_grad_norm_
    x = torch.randn(4, 16)
    steps = {name: partial(step, clips[name], *run, x) for name, run in runs.items()}
    return medians(in_turns(steps, warm_up=WARM_UP, rounds=ROUNDS))


def figures() -> dict[str, float]:
    """By contender, its time as a share of FSDP2's with torch's own clipping; and those of Muon.

    Raises:
        Loaded: the machine was not idle.
    """
    with idle():
        seconds = on_ranks(work, WORLD)[0]
        of_muon = muon.figures()
    return {name: taken / seconds[FSDP2] for name, taken in seconds.items()} | of_muon


def report(found: dict[str, float]) -> int:
    """Print the table; how many bounds were missed."""
    print("clipping and AdamW on 2,000 small parameters, as a share of FSDP2's\n")
    print(table(list(NAMES), [[f"{found[name]:.2f}" for name in NAMES]]))
    missed = [name for name, bound in BOUNDS.items() if found[name] > bound]
    return verdict(missed) + muon.report(found)
