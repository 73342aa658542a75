"""Backward in two threads of autograd, and an engine that two threads use.

Programs that need a second device run in processes of their own, as a process keeps that device.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard.schedule.actions import Action
from tests.lanes.solo import solo
from tests.ranks.autograd import DIM, Tower, check_rest, engine_of, loss_of
from tests.ranks.models import fill, noise

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    node.name
    for node in ast.parse((ROOT / "tests" / "lanes" / "queues.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.decorator_list
]
"""Their names are read, not imported: this process is to know one device."""


@pytest.fixture(autouse=True)
def _leaves_no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_threads_of_autograd(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.lanes.queues", name],
        cwd=ROOT,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 6


def sharded() -> Any:
    model = fill(Tower().double())
    for block in model.blocks:
        fullshard.fully_shard(block)
    return fullshard.fully_shard(model)


def batch() -> Tensor:
    return noise(4, DIM, seed=1)


def started(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


class Alone:
    """An observer of actions, in the first of which another thread begins ``function``."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.other: threading.Thread | None = None
        self.overlap = threading.Event()
        self._acting: set[int] = set()

    @contextmanager
    def acting(self, action: Action) -> Iterator[None]:
        """See ``Observer.acting``."""
        if self._acting - {threading.get_ident()}:
            self.overlap.set()
        self._acting.add(threading.get_ident())
        if self.other is None:
            self.other = started(self.function)
            self.overlap.wait(1.0)  # it has this long to come between
        yield
        self._acting.discard(threading.get_ident())


def test_actions_of_two_threads_do_not_overlap() -> None:
    with solo(2):
        model = sharded()
        loss = loss_of(model(batch()))
        alone = Alone(lambda: model.blocks[0].unshard())
        engine_of(model).observer = alone
        loss.backward()
        assert alone.other is not None
        alone.other.join()
        assert not alone.overlap.is_set()


class Met(nn.Module):
    """A block that tells when it runs forward, and goes on when told."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.inside, self.go = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.inside.set()
        assert self.go.wait(20)
        return self.block(x)


def test_a_forward_in_a_second_thread_is_refused() -> None:
    plain = fill(Tower().double())
    expected = plain(batch())
    model = fill(Tower().double())
    middle = model.blocks[1] = Met(model.blocks[1])
    for block in model.blocks:
        fullshard.fully_shard(block)
    fullshard.fully_shard(model)
    found: list[Tensor] = []
    other = started(lambda: found.append(model(batch())))
    assert middle.inside.wait(20)
    for module in (model, model.blocks[1], model.blocks[2]):
        with pytest.raises(fullshard.errors.BusyError, match="from one thread at a time") as error:
            module(batch())
    assert "unit blocks.2" in str(error.value)
    middle.go.set()
    other.join()
    assert torch.equal(found[0], expected)
    loss_of(found[0]).backward()
    check_rest(model)
    loss_of(model(batch())).backward()  # this thread may, now
    check_rest(model)


class Gate(torch.autograd.Function):
    """The identity, whose backward tells that it runs, and goes on when told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inside: threading.Event, go: threading.Event) -> Tensor:
        ctx.inside, ctx.go = inside, go
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.inside.set()
        assert ctx.go.wait(20)
        return grads[0], None, None


class Gated(nn.Module):
    """A block that waits in the middle of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.inside, self.go = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Gate.apply(torch.tanh(self.up(x)), self.inside, self.go))


def in_backward() -> tuple[Any, threading.Thread]:
    """A model, and a thread that is in the middle of its backward."""
    model = fill(Tower(Gated(), Gated(), Gated()).double())
    for block in model.blocks:
        fullshard.fully_shard(block)
        block.go.set()
    fullshard.fully_shard(model)
    middle = model.blocks[1]
    middle.go.clear()
    thread = started(loss_of(model(batch())).backward)
    assert middle.inside.wait(20)
    return model, thread


def test_a_forward_waits_for_the_backward_of_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, other = in_backward()
    go, real = model.blocks[1].go, time.sleep
    monkeypatch.setattr("time.sleep", lambda seconds: (go.set(), real(seconds)))
    output = model(batch())
    assert go.is_set()
    loss_of(output).backward()
    other.join()
    check_rest(model)


def test_a_forward_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fullshard.engine.autograd._LINGERS_S", 0.01)
    model, other = in_backward()
    with pytest.raises(fullshard.errors.BusyError, match="another thread is in a backward"):
        model(batch())
    model.blocks[1].go.set()
    other.join()
    check_rest(model)
    loss_of(model(batch())).backward()
    check_rest(model)
