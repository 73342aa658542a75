"""Races: one process plays a rank of many, everything takes a random while, freed memory is NaN.

A program runs twice: with all its work on one stream, and on the streams of ``StreamLanes`` with
random sleeps before and after each collective and in each block. Both must agree bit for bit. Then
each wait is deleted, one at a time: if no program notices, the check is worth nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fullshard
from bench.contenders import units
from bench.gpu.machine import WORLD, Failed, Machine, Verdict, same
from bench.gpu.model import SMALL, Llama, sizes_for, tokens_of
from fullshard.comm import Done, Pending, Then, Wrapper, wrapped
from fullshard.device import Buffer, Lane
from fullshard.device.streams import Lanes, OnStream, StreamLanes
from fullshard.engine import Engine, executor

STEPS = 20
LENGTH = 64
LONGEST_US = 2000.0
"""The longest sleep: a block's host time; a shorter one would end before a missing wait matters."""


@dataclass(frozen=True)
class Acting(Wrapper):
    """Plays the other ranks, whose values are made of ours, at a leisurely pace."""

    machine: Machine
    pace: random.Random

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """Fill the other ranks' rows with our values; floats get a factor for each rank."""
        self._sleep()
        for output, source in zip(outputs, sources, strict=True):
            rows = output.view(self.world, -1)
            own = rows[self.rank]
            if own.data_ptr() != source.data_ptr():
                own.copy_(source)
            for rank, row in enumerate(rows):
                if rank != self.rank:
                    factor = 1 + (rank - self.rank) / 64
                    row.copy_(own * factor if own.is_floating_point() else own)
        self._sleep()
        return Done()

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """Return our own slice, and overwrite the source, as real collectives may."""
        self._sleep()
        output.copy_(source.view(self.world, -1)[self.rank])
        source.fill_(torch.nan)
        self._sleep()
        return Done()

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """Of equal values."""
        self._sleep()
        values.mul_(0.5)
        self._sleep()
        return Done()

    def all_to_all(self, output: Tensor, source: Tensor) -> Pending:
        """Others send what we do."""
        self._sleep()
        output.copy_(source)
        self._sleep()
        return Done()

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """Ours are as good as any."""
        return Done()

    def _sleep(self) -> None:
        self.machine.sleep(self.pace.uniform(0, LONGEST_US))


class _Pause(torch.autograd.Function):
    """Takes a while, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sleep: Callable[[], None]) -> Tensor:
        ctx.sleep = sleep
        sleep()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.sleep()
        return grad, None


@dataclass(frozen=True)
class Program:
    """A way to shard a model and to step it."""

    layout: Any
    low: bool = True
    """bf16, reduced in fp32."""
    reshard: bool | int = True
    checkpoint: bool = False
    accumulate: int = 1
    replicas: int = 1
    offload: bool = False
    wire: str | None = None
    """Codec of gathers and reductions."""

    def __str__(self) -> str:
        kept = [f"{name}={value}" for name, value in vars(self).items() if name != "layout"]
        return f"{type(self.layout).__name__} {' '.join(kept)}"

    def shard(self, machine: Machine, model: Llama) -> Any:
        """Blocks and root."""
        shape = (WORLD,) if self.replicas == 1 else (self.replicas, WORLD // self.replicas)
        mesh = init_device_mesh(
            machine.device.type, shape, mesh_dim_names=("copies", "parts")[-len(shape) :]
        )
        low = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        options: dict[str, Any] = {
            "mesh": mesh,
            "layout": self.layout,
            "reshard_after_forward": self.reshard,
            "mp_policy": low if self.low else fullshard.MixedPrecisionPolicy(),
        }
        if self.wire:
            options["wire"] = fullshard.WirePolicy(gather=self.wire, reduce=self.wire)
        if self.offload:
            options["offload_policy"] = fullshard.CPUOffloadPolicy()
        return units(fullshard.fully_shard, **options)(model)


def programs(machine: Machine) -> list[Program]:
    """One thing changed at a time, and some together, in both layouts."""
    found = []
    for layout in (fullshard.PerParameter(), fullshard.Ragged()):
        here = partial(Program, layout)
        found += [
            here(),
            here(low=False),
            here(reshard=False),
            here(reshard=2),
            here(checkpoint=True),
            here(accumulate=2),
            here(replicas=2),
            here(checkpoint=True, accumulate=2, replicas=2),
            here(low=False, wire="int8"),
            here(wire="fp8", replicas=2),
        ]
        if machine.is_real:
            found += [here(offload=True), here(offload=True, low=False, accumulate=2)]
    return found


class _Serial(Lanes):
    """All work on the stream that is current."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def mark(self) -> Any:
        """Nothing is left to wait for."""
        self._machine.synchronize()
        return super().mark()


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory of buffers is NaN when they get it and when they lose it."""
    allocate, free = Buffer.allocate, Buffer.free

    def spoil(buffer: Buffer) -> None:
        if buffer.tensor.is_floating_point():
            buffer.tensor.data.fill_(torch.nan)

    def allocated(buffer: Buffer) -> None:
        is_new = not buffer.allocated
        allocate(buffer)
        if is_new:
            spoil(buffer)

    def freed(buffer: Buffer) -> None:
        if buffer.allocated:
            spoil(buffer)
        free(buffer)

    with patch.object(Buffer, "allocate", allocated), patch.object(Buffer, "free", freed):
        yield


def run(machine: Machine, program: Program, *, steps: int, seed: int | None) -> list[Tensor]:
    """Losses and shards at the end; on streams at a random pace by ``seed``, or on one stream."""
    pace = random.Random(seed)
    sizes = sizes_for(machine, SMALL)
    torch.manual_seed(1)
    model = Llama(sizes).to(machine.device)

    def sleep() -> None:
        if seed is not None:
            machine.sleep(pace.uniform(0, LONGEST_US))

    def run_block(block: nn.Module, x: Tensor) -> Tensor:
        x = _Pause.apply(x, sleep)  # type: ignore[no-untyped-call]
        return checkpoint(block, x, use_reentrant=False) if program.checkpoint else block(x)

    def lanes(device: torch.device) -> Lanes:
        return _Serial(machine) if seed is None else machine.lanes(device)

    quiet = Machine(torch.device("cpu")) if seed is None else machine  # whose sleeps take no time
    with (
        poisoned(),
        patch.object(executor, "make_lanes", lanes),
        wrapped(lambda inner: Acting(inner, quiet, pace)),
    ):
        model.run_block = run_block  # type: ignore[method-assign]
        sharded = program.shard(machine, model)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.05)
        # Not in the loop: the host would wait there until the device has done the step before.
        batches = [tokens_of(machine, sizes, LENGTH, step) for step in range(steps)]
        losses = []
        for tokens in batches:
            for micro in range(program.accumulate):
                sharded.set_requires_gradient_sync(micro == program.accumulate - 1)
                loss = sharded(tokens)
                loss.backward()
                losses.append(loss.detach())
            for _ in range(3):  # the host has much to do before the next gather
                sleep()
            optimizer.step()
            optimizer.zero_grad()
        machine.synchronize()
        shards = [p.to_local().detach().cpu() for p in sharded.parameters()]
    return [*(loss.cpu() for loss in losses), *shards]


def races(machine: Machine) -> Verdict:
    """Every program on streams, against itself on one stream."""
    steps = STEPS if machine.is_real else 2
    with machine.first_of_many():
        chosen = programs(machine)
        for number, program in enumerate(chosen):
            expected = run(machine, program, steps=steps, seed=None)
            if not all(tensor.isfinite().all() for tensor in expected):
                raise Failed(f"{program}: not finite on one stream")
            if not same(expected, run(machine, program, steps=steps, seed=number)):
                raise Failed(f"{program}: streams change the result")
    return Verdict(passed=True, figures={"programs": len(chosen), "steps": steps})


def _without_join(waiter: Lane, awaited: Lane) -> AbstractContextManager[Any]:
    join = StreamLanes.join

    def joined(self: StreamLanes, one: Lane, other: Lane) -> None:
        if (one, other) != (waiter, awaited):
            join(self, one, other)

    return patch.object(StreamLanes, "join", joined)


def _without_ready() -> AbstractContextManager[Any]:
    def issue(self: OnStream, start: Callable[[], Pending]) -> Pending:
        with self.accelerator.stream(self.stream):
            pending = start()
        done = self.accelerator.Event()
        done.record(self.stream)
        return Then(None, partial(self._end, done, pending))

    return patch.object(OnStream, "_issue", issue)


CONTROLS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "compute does not wait for gathers": partial(_without_join, Lane.COMPUTE, Lane.GATHER),
    "memory is freed under compute": partial(_without_join, Lane.GATHER, Lane.COMPUTE),
    "reductions do not wait for gradients": partial(_without_join, Lane.REDUCE, Lane.COMPUTE),
    "nothing waits for reductions": partial(_without_join, Lane.COMPUTE, Lane.REDUCE),
    "collectives do not wait for their lane": _without_ready,
    "lanes do not wait for collectives": partial(
        patch.object, OnStream, "_end", lambda self, done, pending: pending.wait()
    ),
    "copies from the host write under gathers": partial(
        _without_join, Lane.HOST_TO_DEVICE, Lane.GATHER
    ),
    "gathers do not wait for the optimizer": partial(
        patch.object, Engine, "_fence", lambda self: None
    ),
}
"""Ways to break what keeps streams in order; each must be found."""


def controls(machine: Machine) -> Verdict:
    """Every wait deleted once: some program must change its result, or die."""
    steps = 6 if machine.is_real else 1
    tried = [Program(fullshard.PerParameter()), Program(fullshard.Ragged(), replicas=2)]
    if machine.is_real:
        tried.append(Program(fullshard.PerParameter(), offload=True))
    figures: dict[str, bool] = {}
    with machine.first_of_many():
        for name, broken in CONTROLS.items():
            figures[name] = any(_notices(machine, one, broken, steps) for one in tried)
    missed = [name for name, noticed in figures.items() if not noticed]
    if not machine.is_real:
        return Verdict(passed=True, figures=figures, notes=["a stand-in has nothing to race"])
    return Verdict(passed=not missed, figures=figures, notes=[f"not found: {n}" for n in missed])


def _notices(
    machine: Machine,
    program: Program,
    broken: Callable[[], AbstractContextManager[Any]],
    steps: int,
) -> bool:
    expected = run(machine, program, steps=steps, seed=None)
    for seed in range(3 if machine.is_real else 1):
        with ExitStack() as stack:
            stack.enter_context(broken())
            if not same(expected, run(machine, program, steps=steps, seed=seed)):
                return True
    return False
