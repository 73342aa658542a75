"""Backward in another thread than forward, as autograd runs it on devices other than the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.device import Lane
from fullshard.device.streams import Lanes
from fullshard.frontend.ownership import unit_of
from fullshard.schedule.triggers import Transcript
from tests.ranks.autograd import DIM, Tower, engine_of, loss_of
from tests.ranks.models import fill, full_parameters, noise, shard_units
from tests.ranks.pool import on_ranks


def elsewhere(function: Callable[[], object]) -> None:
    """Run ``function`` in a new thread, where autograd numbers nodes from 0."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def here(function: Callable[[], object]) -> None:
    function()


class Checkpointed(Tower):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.run: Any = partial(checkpoint, use_reentrant=reentrant)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.ones_like(x, requires_grad=True)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


def sharded(*, reentrant: bool) -> Any:
    model = fill(Checkpointed(reentrant=reentrant).double())
    return shard_units(model, model.blocks)


def batch(number: int) -> Tensor:
    return noise(4, DIM, seed=number)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_elsewhere_leaves_the_thread_whose_optimizers_count(reentrant: bool) -> None:
    """The next forward sees a step on aliases of the shards, wherever backward recomputed."""
    losses = []
    for back in (here, elsewhere):
        model = sharded(reentrant=reentrant)
        model.set_reshard_after_backward(False)  # units stay unsharded, stale after the step
        sharded_params = list(model.parameters())
        masters = [nn.Parameter(p.to_local().data) for p in sharded_params]
        optimizer = torch.optim.SGD(masters, lr=0.5, foreach=True)
        back(loss_of(model(batch(0))).backward)
        for master, param in zip(masters, sharded_params, strict=True):
            master.grad = param.grad.to_local()
        optimizer.step()
        losses.append(loss_of(model(batch(1))).item())
    expected, found = losses[0], losses[1]
    assert found == expected


@on_ranks(2)
def test_an_optimizer_of_flat_parameters_is_known_in_any_thread() -> None:
    """The engine recognises an optimizer of its flat parameters.

    The engine sees no other sign of an optimizer that steps in another thread.
    """
    model = fullshard.FullyShardedDataParallel(
        fill(Tower().double()), device_id=torch.device("cpu"), use_orig_params=False
    )
    unit = unit_of(model)
    assert unit is not None and unit.engine is not None
    assert unit.engine.shares_params(torch.optim.SGD(model.parameters(), lr=0.1))


def _without_tasks(transcript: Transcript) -> str:
    """Return the transcript with tasks numbered in order of appearance."""
    numbers: dict[int, int] = {-1: -1}
    lines = []
    for trigger, actions in transcript.events:
        task = getattr(trigger, "task", -1)
        number = numbers.setdefault(task, len(numbers) - 1)
        if "task" in getattr(trigger, "_fields", ()):
            trigger = trigger._replace(task=number)  # type: ignore[attr-defined]
        lines.append(f"{trigger} -> {', '.join(map(str, actions))}")
    return "\n".join(lines)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_machine_is_told_the_same_whatever_thread_runs_backward(reentrant: bool) -> None:
    """The scheduler makes the same decisions whichever thread runs backward."""
    told, ends = [], []
    for back in (here, elsewhere):
        model = sharded(reentrant=reentrant)
        transcript = Transcript()
        engine_of(model).recorder = transcript
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            loss = loss_of(model(batch(number)))
            back(loss.backward)
            optimizer.step()
            optimizer.zero_grad()
        told.append(_without_tasks(transcript))
        ends.append(full_parameters(model))
    apart = max((ends[0][n] - ends[1][n]).abs().max().item() for n in ends[0])
    expected, found = told[0], told[1]
    assert apart <= 1e-12
    assert found == expected


class Joined(Lanes):
    """Lanes that record each join."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[Lane, Lane]] = []

    def join(self, waiter: Lane, awaited: Lane) -> None:
        self.notes.append((waiter, awaited))


@on_ranks(2)
def test_a_backward_ends_with_all_lanes_joined() -> None:
    """A backward ends with all lanes joined, as a CUDA graph of a step requires."""
    lanes = Joined()
    with patch("fullshard.engine.executor.make_lanes", lambda device: lanes):
        model = sharded(reentrant=False)
        for number in range(2):
            loss_of(model(batch(number))).backward()
    last = max(i for i, note in enumerate(lanes.notes) if note[0] is Lane.GATHER)
    assert (Lane.COMPUTE, Lane.GATHER) in lanes.notes[last:]
