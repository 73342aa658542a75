"""Optimizer state that lives on the host, and is streamed through a step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from fullshard import FSDPModule
from fullshard.optim import ShardedOptimizer, clip_grad_norm_
from fullshard.tensors import local_part
from tests.lanes.programs.base import backward, both_layouts, program, script, step


def made(model: Any, cls: type[Optimizer], fraction: float, **options: Any) -> Optimizer:
    """A group with and one without units' biases, so that there are several runs."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]
    if isinstance(model, FSDPModule):
        return ShardedOptimizer(groups, cls, host_fraction=fraction, **options)
    return cls(groups, **options)


def read(optimizer: Optimizer) -> float:
    """The host reads state; it waits for that, and for nothing else."""
    found = 0.0
    for own in optimizer.state.values():
        for value in own.values():
            if isinstance(value, Tensor) and value.dim():
                found += sum(local_part(value).flatten().tolist())
    return found


@program()
def states_on_the_host() -> float:
    """Accumulated, clipped; state is read after some steps, not after others."""

    def script(fraction: float, model: Any) -> None:
        optimizer = made(model, AdamW, fraction, lr=1e-2, amsgrad=True)
        for number in range(5):
            for last in (False, True):
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(last)
                backward(model, number + last)
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            if number in (2, 4):
                read(optimizer)

    return max(both_layouts(lambda model, f=f: script(f, model)) for f in (0.5, 1.0))


@script
def states_that_are_joined_on_the_host(model: Any) -> None:
    """Runs split where gradients are missing, and are joined again; the host copies their state."""
    options = {"host_fraction": 1.0} if isinstance(model, FSDPModule) else {}
    cls: Any = partial(ShardedOptimizer, optimizer_class=SGD) if options else SGD
    optimizer = cls(model.parameters(), lr=0.1, momentum=0.9, **options)
    for number in range(6):
        backward(model, number)
        if number == 0:
            model.blocks[0].bias.grad = model.head.weight.grad = None
        if number == 3:
            model.blocks[1].weight.grad = model.scale.grad = None
        optimizer.step()
        optimizer.zero_grad()


class New(Optimizer):
    """Makes its state anew in each step, and drops some."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                own = self.state[param]
                own["mean"] = own.get("mean", 0) * 0.5 + param.grad
                own["old"] = own["mean"] * 2
                if own.pop("other", None) is None:
                    own["other"] = own["mean"] * 3
                param.sub_(own["mean"] + own.get("other", 0), alpha=group["lr"])


@script
def states_made_anew_on_the_host(model: Any) -> None:
    optimizer = made(model, New, 1.0)
    for number in range(4):
        step(model, optimizer, number)
    read(optimizer)
