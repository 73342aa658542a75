"""Shared by the programs.

Each program trains a model sharded and unsharded, on the same batches on all ranks, and returns the
largest difference of the parameters at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard import FSDPModule, PerParameter, Ragged
from tests.ranks.net import batch, optimizer_of, train_both

LAYOUTS = (PerParameter(), Ragged())


class Program(NamedTuple):
    """A program, on how many ranks, and how far apart it may end."""

    name: str
    run: Callable[[], float]
    world: int = 2
    tolerance: float = 1e-10


PROGRAMS: list[Program] = []
"""All of them, once the modules beside this one are imported."""


def program(world: int = 2, tolerance: float = 1e-10) -> Callable[[Callable[[], float]], Any]:
    """Enter a function in ``PROGRAMS``."""

    def add(run: Callable[[], float]) -> Callable[[], float]:
        PROGRAMS.append(Program(run.__name__, run, world, tolerance))
        return run

    return add


def script(run: Callable[[Any], None]) -> Callable[[Any], None]:
    """Enter a training of one model in ``PROGRAMS``, in both layouts on two ranks."""
    PROGRAMS.append(Program(run.__name__, partial(both_layouts, run)))
    return run


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    """Train one step; the host waits for nothing, which would order all that follows."""
    backward(model, number)
    optimizer.step()
    optimizer.zero_grad()


def backward(model: nn.Module, number: int) -> None:
    """Run forward and backward on one batch."""
    model(batch(number, next(model.parameters()).dtype)).square().mean().backward()


def steps(model: nn.Module, num: int = 3) -> None:
    """Train a few steps."""
    optimizer = optimizer_of(model)
    for number in range(num):
        step(model, optimizer, number)


def both_layouts(script: Callable[[nn.Module], None], **options: Any) -> float:
    """Run ``script`` on the unsharded model, and on one sharded in each layout."""
    return max(train_both(script, layout=layout, **options) for layout in LAYOUTS)


def units_of(model: Any) -> list[Any]:
    """The sharded modules; none, if this is the unsharded model."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
