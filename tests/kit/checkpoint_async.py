"""Jobs with asynchronous saves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fullshard import checkpoint
from fullshard.checkpoint.format.datafile import DataWriter
from fullshard.checkpoint.saving.pending import await_save
from fullshard.optim import ShardedOptimizer
from tests.kit.checkpoint_files import WAYS, plain
from tests.ranks.models import noise


def trains(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Run forward and backward twice, then a step."""
    for part in (0, 1):
        model(noise(4, 192, seed=seed + part)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def disk(do: Callable[[str], object]) -> Iterator[None]:
    """Call ``do`` with a tensor's name before each of its chunks is written."""
    put = DataWriter.put

    def slow(writer: DataWriter, name: str, start: int, data: Tensor) -> None:
        do(name)
        put(writer, name, start, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataWriter, "put", slow)
        yield


@contextmanager
def slow_disk() -> Iterator[threading.Event]:
    """Delay writes of stepped tensors until the event is set; set the event at the end."""
    goes_on = threading.Event()

    def wait(name: str) -> None:
        if "blocks" in name:
            assert goes_on.wait(300)

    with disk(wait):
        try:
            yield goes_on
        finally:
            goes_on.set()
            await_save()


def begins(call: Callable[[], object]) -> threading.Thread:
    """Run ``call`` in a thread; return the thread once the call has begun."""
    has_begun = threading.Event()
    thread = threading.Thread(target=lambda: (has_begun.set(), call()))
    thread.start()
    has_begun.wait()
    thread.join(0.3)
    return thread


def steps_wait(path: Path, kind: str, budget: int | None) -> bool:
    """Return True if a step waits for the disk."""
    model = WAYS["ragged"](plain(1))
    params = model.parameters()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, fused=kind == "fused")
    if kind == "sharded":
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    trains(model, optimizer, 0)
    with slow_disk() as goes_on:
        checkpoint.save(path, model, optimizer, step=1, mode="async", budget_nbytes=budget)
        for number in range(2):  # backwards do not wait
            model(noise(4, 192, seed=number)).square().mean().backward()
        step = begins(optimizer.step)
        if budget is None:
            step.join(60)  # the step does not wait, but may be slow
        waits = step.is_alive()
        goes_on.set()
        step.join()
    return waits
