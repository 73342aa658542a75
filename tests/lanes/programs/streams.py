"""Models that compute on two streams."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fullshard import CPUOffloadPolicy, fully_shard
from tests.lanes.checker import current_checker
from tests.lanes.programs.base import LAYOUTS, program
from tests.ranks.models import fill
from tests.ranks.net import apart, batch, optimizer_of


class Branches(nn.Module):
    """One branch on a stream of its own; the module around them has parameters on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.before = nn.Linear(6, 6)
        self.aside = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.along = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, stream: Any = None) -> Tensor:
        x = torch.tanh(self.before(x * self.scale))
        with other(stream):
            y = self.aside(x * 2)
        z = self.along(x) * self.scale
        if stream is not None:
            current_checker().accelerator.current_stream().wait_stream(stream)
        return self.head(y + z)


def other(stream: Any) -> AbstractContextManager[Any]:
    """Return a context in which ``stream`` is current, after all work of the current stream."""
    if stream is None:
        return nullcontext()
    accelerator = current_checker().accelerator
    stream.wait_stream(accelerator.current_stream())
    return accelerator.stream(stream)


class Wrapper(nn.Module):
    """So that the module with both branches is no root: it is reduced while backward goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.both = Branches()

    def forward(self, x: Tensor, stream: Any = None) -> Tensor:
        return self.both(torch.tanh(self.first(x)), stream)


def run(*, accumulates: bool = False, **options: Any) -> float:
    plain = fill(Wrapper().double())
    model: Any = copy.deepcopy(plain)
    both = model.both
    for unit in (*both.aside, *both.along, both.before, both, model.first, model):
        fully_shard(unit, **options)
    stream = current_checker().accelerator.Stream()
    optimizers = [optimizer_of(plain), optimizer_of(model)]
    for number in range(3):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            for last in (False, True) if accumulates else (True,):
                if one is model:
                    model.set_requires_gradient_sync(last)
                one(batch(number + last), stream if one is model else None).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return apart(model, plain)


class InTurns(nn.Module):
    """Goes to and fro between two streams, so that backward leaves a unit of one on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.along = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, stream: Any = None) -> Tensor:
        y = z = x
        with other(stream):
            y = torch.tanh(self.aside[0](y))
        for aside, along in zip(self.aside[1:], self.along, strict=True):
            z = torch.tanh(along(z))
            with other(stream):
                y = torch.tanh(aside(y))
        if stream is not None:
            current_checker().accelerator.current_stream().wait_stream(stream)
        return self.head(y + z)


@program()
def two_streams_in_turns() -> float:
    def run(*, syncs: tuple[bool, ...]) -> float:
        plain = fill(InTurns().double())
        model: Any = copy.deepcopy(plain)
        for unit in (*model.aside, *model.along, model):
            fully_shard(unit)
        stream = current_checker().accelerator.Stream()
        for one in (plain, model):
            optimizer = optimizer_of(one)
            for number in range(2):
                for sync in syncs:
                    if one is model:
                        model.set_requires_gradient_sync(sync)
                    one(batch(number), stream if one is model else None).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return apart(model, plain)

    return max(run(syncs=syncs) for syncs in ((True,), (False, False, True)))


@program()
def two_streams() -> float:
    return max(run(layout=layout) for layout in LAYOUTS)


@program()
def two_streams_that_keep() -> float:
    return max(run(layout=layout, reshard_after_forward=False) for layout in LAYOUTS)


@program()
def two_streams_that_accumulate() -> float:
    return run(accumulates=True)


@program()
def two_streams_offloaded() -> float:
    return run(offload_policy=CPUOffloadPolicy())
