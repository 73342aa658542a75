"""Programs whose backward runs in two threads, the caller's and that of a second device.

python -m tests.lanes.queues NAME

Units are on the CPU, the fake accelerator's device, and hand tensors to the second device, as on a
GPU they hand tensors to the CPU. Events decide which thread comes first.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.engine.autograd import Backward
from fullshard.schedule import triggers as when
from fullshard.schedule.triggers import Event
from tests.lanes.away import AWAY, bring
from tests.lanes.checked import checked
from tests.lanes.solo import solo
from tests.ranks.autograd import DIM, check_rest, engine_of
from tests.ranks.models import fill, noise

PATIENCE_S = 20.0

PROGRAMS: dict[str, Callable[[], None]] = {}


def program(run: Callable[[], None]) -> Callable[[], None]:
    """Enter a function in ``PROGRAMS``."""
    PROGRAMS[run.__name__] = run
    return run


def awaited(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S), "the other thread does not come"


class Gate(torch.autograd.Function):
    """The identity, whose backward calls ``function``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], object]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.function()
        return grads[0], None


class Reads(torch.autograd.Function):
    """Computes for the second device, and reads ``weight`` in backward, after ``function``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, function: Callable[[], object]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.function = function
        return (x * weight.sum()).sum().to(AWAY)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.function()
        x, weight = ctx.saved_tensors
        grad = grads[0].to("cpu") * x.sum()
        return None, grad * torch.ones_like(weight) + 0 * weight, None


def nothing() -> None:
    """Do nothing."""


class Block(nn.Module):
    """A layer that calls ``gate`` in the middle of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.down = nn.Linear(DIM, DIM)
        self.gate: Callable[[], object] = nothing
        self.met: Callable[[], object] = nothing
        self.reads: Callable[[], object] | None = None

    def forward(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return an output, and an auxiliary loss on the second device."""
        self.met()
        x = Gate.apply(torch.tanh(self.up(x)), self.gate)
        if added is not None:
            x = x + added.to("cpu")
        x = self.down(x)
        if self.reads is not None:
            return x, Reads.apply(x.detach(), self.up.weight, self.reads)
        return x, x.square().mean().to(AWAY)


class Model(nn.Module):
    """Three blocks; ``look`` is shown the auxiliary losses, oldest first, as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, DIM)
        self.look: Callable[[int, Tensor], object] = lambda number, aux: None
        self.first = 0  # the block whose auxiliary loss is the first that counts
        self.adds: Tensor | None = None
        self.inner: Callable[[Tensor], object] | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return an output, and the sum of all auxiliary losses on the second device."""
        total = torch.zeros((), dtype=x.dtype).to(AWAY)
        for number, block in enumerate(self.blocks):
            x, aux = block(x, self.adds if number == 2 else None)
            self.look(number, aux)
            total = total + (aux if number >= self.first else aux.detach())
            if number == 1 and self.inner is not None:
                self.inner(loss_of((x, total)))
        return self.head(x), total


def sharded() -> Any:
    model = fill(Model().double())
    for block in model.blocks:
        fullshard.fully_shard(block)
    return fullshard.fully_shard(model)


def loss_of(output: tuple[Tensor, Tensor]) -> Tensor:
    y, total = output
    return total.to("cpu") + y.square().mean()


def batch() -> Tensor:
    return noise(4, DIM, seed=1)


def mend(model: Any) -> None:
    """Let later steps be plain ones."""
    model.look = lambda number, aux: None
    for block in model.blocks:
        block.gate = block.met = nothing


def in_two_threads(model: Any) -> None:
    """A step, and one more after it, which finds nothing left behind."""
    loss_of(model(batch())).backward()
    check_rest(model)
    mend(model)
    loss_of(model(batch())).backward()
    check_rest(model)


@program
def outputs_elsewhere() -> None:
    """The other thread comes to an output of block 1 while backward is inside of block 2."""
    model = sharded()
    inside, passed = threading.Event(), threading.Event()

    def look(number: int, aux: Tensor) -> None:
        if number == 1:
            aux.register_hook(lambda grad: awaited(inside))
            assert aux.grad_fn is not None
            aux.grad_fn.register_prehook(lambda grads: passed.set())  # after ours

    def gate() -> None:
        inside.set()
        awaited(passed)

    model.look, model.blocks[2].gate = look, gate
    in_two_threads(model)


@program
def inputs_elsewhere() -> None:
    """The other thread comes to an input of block 2 while backward is inside of block 2."""
    model = sharded()
    passed = threading.Event()
    leaf = noise(4, DIM, seed=2).requires_grad_()
    model.adds = leaf.to(AWAY)
    assert model.adds.grad_fn is not None
    model.blocks[2].gate = lambda: awaited(passed)
    register = model.adds.grad_fn.register_prehook

    def look(number: int, aux: Tensor) -> None:
        if number == 2:
            register(lambda grads: passed.set())  # after ours

    model.look = look
    loss_of(model(batch())).backward()
    check_rest(model)
    assert leaf.grad is not None


@program
def outputs_elsewhere_alone() -> None:
    """The backward reaches the model only through an output that was moved to another device."""
    model = sharded()
    _, total = model(batch())
    total.to("cpu").backward()
    check_rest(model)
    assert all(param.grad is not None for param in model.blocks.parameters())


@program
def a_function_elsewhere_that_reads() -> None:
    """The other thread reads a parameter of block 1 after backward has left the block."""
    model = sharded()
    left = threading.Event()
    model.blocks[1].reads = lambda: awaited(left)
    model.blocks[0].gate = left.set
    model.first = 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model(batch())).backward()
    check_rest(model, hides=True)
    assert model.blocks[1].up.weight.grad is not None
    optimizer.step()
    model.blocks[1].reads = None
    loss_of(model(batch())).backward()
    check_rest(model)


class Heard:
    """The triggers, each with the thread that raised it."""

    def __init__(self) -> None:
        self.told: list[tuple[type, int]] = []
        self.died = threading.Event()

    def record(self, event: Event) -> None:
        """Record the trigger and the thread."""
        self.told.append((type(event.trigger), threading.get_ident()))
        if type(event.trigger) is when.TaskDied:
            self.died.set()


class Trouble(Exception):
    """Ends a backward."""


def fail_while_the_other_thread_is_held(model: Any, number: int, go: threading.Event) -> None:
    """Make backward raise in a block; the other thread, at block 0, keeps the task until ``go``."""
    held = threading.Event()

    def hold(grad: Tensor) -> None:
        held.set()
        awaited(go)

    def fail() -> None:
        awaited(held)
        raise Trouble

    model.look = lambda number, aux: aux.register_hook(hold) if number == 0 else None
    model.blocks[number].gate = fail


@program
def a_task_that_lingers() -> None:
    """The other thread lets go of a backward that died when the next forward has been called."""
    model = sharded()
    go, heard = threading.Event(), Heard()
    fail_while_the_other_thread_is_held(model, 2, go)
    loss = loss_of(model(batch()))
    with pytest.raises(Trouble):
        loss.backward()
    mend(model)
    engine_of(model).recorder = heard

    def met() -> None:  # in the first forward
        go.set()
        awaited(heard.died)

    def sleep(seconds: float) -> None:  # while the forward waits
        go.set()
        real(seconds)

    model.blocks[0].met, real = met, time.sleep
    with patch.object(time, "sleep", sleep):
        output = model(batch())
    kinds = [kind for kind, _ in heard.told]
    assert kinds[:2] == [when.TaskDied, when.ForwardEnter], kinds
    loss_of(output).backward()
    check_rest(model)


@program
def a_task_that_died_in_a_forward() -> None:
    """A forward catches the error of a backward that it called; the other thread reports it."""
    model = sharded()
    go, told, heard = threading.Event(), threading.Event(), Heard()
    engine_of(model).recorder = heard
    died = Backward.died

    def tell(backward: Backward, task: int) -> None:
        died(backward, task)
        told.set()

    def inner(loss: Tensor) -> None:
        model.inner = None
        with pytest.raises(Trouble):
            loss.backward()
        go.set()
        awaited(told)

    fail_while_the_other_thread_is_held(model, 1, go)
    model.inner = inner
    with patch.object(Backward, "died", tell):
        model(batch())
    threads = [thread for kind, thread in heard.told if kind is when.TaskDied]
    assert threads == [threading.get_ident()], "another thread disturbed the forward"
    mend(model)
    loss_of(model(batch())).backward()
    check_rest(model)


def main(name: str) -> None:
    """Run one program under the checker, as rank 0 of two."""
    torch.set_num_threads(1)
    bring()
    with solo(2):
        checked(PROGRAMS[name])


if __name__ == "__main__":
    main(sys.argv[1])
