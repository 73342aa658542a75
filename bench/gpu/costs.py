"""The costs of a step: waits of the host, memory, kernels, time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import fullshard
from bench.contenders import FSDP2, PER_PARAMETER, RAGGED, units
from bench.gpu.machine import WORLD, Failed, Kernel, Machine, Verdict, seconds
from bench.gpu.model import LARGE, SMALL, Llama, made, made_from_meta, sizes_for, tokens_of, train
from bench.gpu.races import Acting
from fullshard.comm import Done, Pending, Wrapper, wrapped

NAMES = (FSDP2, PER_PARAMETER, RAGGED)
WARM_UP, ROUNDS = 5, 20
_COUNTS_INPUTS = hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers")
LENGTHS = {"compute-bound": 4096, "host-bound": 128}


@dataclass(frozen=True)
class _Brief(Wrapper):
    """Collectives that launch one small kernel each and then ``occupy`` the current stream."""

    occupy: Callable[[int], None] = field(default=lambda nbytes: None)

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """Touch the first output."""
        _touch(outputs[0])
        self.occupy(_nbytes(outputs) - _nbytes(sources))
        return Done()

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """Touch the output."""
        _touch(output)
        self.occupy(source.nbytes - source.nbytes * output.numel() // source.numel())
        return Done()


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(one.nbytes for one in tensors)


def _touch(output: Tensor) -> None:
    output.view(-1)[:1].zero_()


@contextmanager
def brief(occupy: Callable[[int], None] = lambda nbytes: None) -> Iterator[None]:
    """A rank of many, whose collectives, FSDP2's and ours, are one small kernel each.

    The fake group makes a copy for each rank and output instead, which no backend does.

    Args:
        occupy: keeps the current stream busy for as long as so many received bytes take.
    """

    def collective(*args: object, **named: object) -> None:
        given = (*args, *named.values())
        output, source = (one for one in given if isinstance(one, Tensor))
        _touch(output)
        occupy(abs(output.nbytes - source.nbytes))

    names = ("all_gather_into_tensor", "reduce_scatter_tensor")
    names += ("all_gather_single", "reduce_scatter_single")  # as torch 2.13 calls them
    with ExitStack() as stack:
        for name in names:
            if hasattr(dist, name):
                stack.enter_context(patch.object(dist, name, collective))
        stack.enter_context(wrapped(lambda inner: _Brief(inner, occupy)))
        yield


def syncs(machine: Machine) -> Verdict:
    """A steady step never makes the host wait, nor does the step after a parameter is frozen.

    Control: a step that reads its loss is refused.
    """
    sizes = sizes_for(machine, SMALL)
    figures = {}
    # The fake group's results are anything at all, flags of gradients included.
    with machine.first_of_many(), wrapped(lambda inner: Acting(inner, machine, Random(0))):
        for name in (PER_PARAMETER, RAGGED):
            model, optimizer = made(machine, name, sizes)
            tokens = tokens_of(machine, sizes, 32)
            for _ in range(3):
                train(model, optimizer, tokens)
            with machine.without_syncs():
                train(model, optimizer, tokens)
            if not _refused(machine, lambda m=model, t=tokens: m(t).item()):
                raise Failed("a loss that the host reads was not noticed")
            model.blocks[0].q.weight.requires_grad_(False)  # type: ignore[index,union-attr]
            model.zero_grad()
            train(model, optimizer, tokens)
            figures[f"{name}: refused with a frozen parameter"] = _refused(
                machine, lambda m=model, o=optimizer, t=tokens: train(m, o, t)
            )
    return Verdict(passed=True, figures=figures)


def _refused(machine: Machine, run: Any) -> bool:
    try:
        with machine.without_syncs():
            run()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    return False


def peak(machine: Machine, name: str, buffers: int, world: int = WORLD) -> dict[str, Any]:
    """Memory of a third step, of the only model in its process, which was never whole there."""
    with machine.first_of_many(world), brief():
        sizes = sizes_for(machine, LARGE)
        model, optimizer = made_from_meta(machine, name, sizes, world)
        if name == FSDP2 and hasattr(model, "set_reduce_scatter_max_input_buffers"):
            model.set_reduce_scatter_max_input_buffers(buffers)
        tokens = tokens_of(machine, sizes, 1024 if machine.is_real else 16)
        for _ in range(2):
            train(model, optimizer, tokens)
        machine.synchronize()
        machine.reset_peaks()
        train(model, optimizer, tokens)
        machine.synchronize()
        return machine.memory() | machine.reserved()


def memory(machine: Machine) -> Verdict:
    """Peaks, allocated and reserved, each contender in a process of its own; not above FSDP2's."""
    figures: dict[str, dict[str, Any]] = {}
    for expandable in (False, True):
        env = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
        for name in NAMES:
            for buffers in (1, 2) if name == FSDP2 and _COUNTS_INPUTS else (1,):
                label = f"{name}, {buffers} inputs" if name == FSDP2 else name
                found = machine.apart(peak, name, buffers, **env)
                figures[f"{label}, expandable={expandable}"] = found
    notes = []
    for expandable in (False, True):
        allowed = figures[f"{FSDP2}, 1 inputs, expandable={expandable}"]
        for name in (PER_PARAMETER, RAGGED):
            found = figures[f"{name}, expandable={expandable}"]
            for kind in ("peak allocated", "peak reserved"):
                if found[kind] > 1.01 * allowed[kind]:
                    share = found[kind] / allowed[kind]
                    notes.append(f"{name}, expandable={expandable}: {kind} {share:.2f} of FSDP2's")
    return Verdict(passed=not notes, figures=figures, notes=notes)


def _is_copy(kernel: Kernel) -> bool:
    return "memcpy" in kernel.name.lower() or "copy" in kernel.name.lower()


def _summary(kernels: list[Kernel]) -> dict[str, float]:
    """Counts, times, and how long no stream had work, of one step."""
    busy_until, idle_us = kernels[0].start_us, 0.0
    for kernel in kernels:
        idle_us += max(0.0, kernel.start_us - busy_until)
        busy_until = max(busy_until, kernel.start_us + kernel.duration_us)
    copies = [kernel for kernel in kernels if _is_copy(kernel)]
    return {
        "kernels": len(kernels),
        "copies": len(copies),
        "copies ms": sum(kernel.duration_us for kernel in copies) / 1e3,
        "busy ms": sum(kernel.duration_us for kernel in kernels) / 1e3,
        "idle ms": idle_us / 1e3,
        "streams": len({kernel.stream for kernel in kernels}),
    }


def launched(machine: Machine, name: str, world: int = WORLD) -> dict[str, float]:
    """Return what a fourth step ran on the device, with no other model in the process."""
    with machine.first_of_many(world), brief():
        sizes = sizes_for(machine, LARGE)
        tokens = tokens_of(machine, sizes, 512 if machine.is_real else 16)
        model, optimizer = made(machine, name, sizes, world)
        for _ in range(3):
            train(model, optimizer, tokens)
        return _summary(machine.traced(lambda: train(model, optimizer, tokens)))


def kernels(machine: Machine) -> Verdict:
    """Kernels, copies and gaps of a step; a collective is one kernel."""
    return Verdict(passed=True, figures={name: machine.apart(launched, name) for name in NAMES})


def _milliseconds(
    machine: Machine, step: Callable[[], object], warm_up: int, rounds: int
) -> dict[str, float]:
    """Return the median times of a step on the host and on the device."""
    if not machine.is_real:
        warm_up, rounds = 0, 1
    taken = [seconds(machine, step) for _ in range(warm_up + rounds)]
    host, whole = (statistics.median(one) for one in zip(*taken[warm_up:], strict=True))
    return {"host ms": 1e3 * host, "step ms": 1e3 * whole}


def offloaded(machine: Machine, pinned: bool) -> dict[str, float]:
    """Seconds of a step with shards on the host, in a process of its own."""
    with machine.first_of_many():
        sizes = sizes_for(machine, SMALL if not machine.is_real else LARGE)
        torch.manual_seed(0)
        model = Llama(sizes).to(machine.device)
        mesh = init_device_mesh(machine.device.type, (WORLD,))
        low = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": low}
        if machine.is_real:
            options["offload_policy"] = fullshard.CPUOffloadPolicy(pin_memory=pinned)
        sharded: Any = units(fullshard.fully_shard, **options)(model)
        tokens = tokens_of(machine, sizes, 512 if machine.is_real else 16)

        def step() -> None:
            sharded(tokens).backward()
            sharded.zero_grad()

        return _milliseconds(machine, step, 3, 5)


def offload(machine: Machine) -> Verdict:
    """Forward and backward with shards on the host, pinned and not, by threads of the host."""
    figures = {}
    for threads in ("1", "16"):
        for pinned in (True, False):
            found = machine.apart(offloaded, pinned, OMP_NUM_THREADS=threads)
            figures[f"pinned={pinned}, {threads} threads"] = found
    return Verdict(passed=True, figures=figures)


def measured(
    machine: Machine, name: str, length: int, world: int = WORLD, gb_s: float = 0.0
) -> dict[str, float]:
    """Milliseconds of a step, of the only model in its process; ``gb_s`` of the wire, 0: no wire.

    A collective keeps its stream busy for the bytes it receives, by a kernel that only waits.
    """

    def occupy(nbytes: int) -> None:
        if gb_s:
            machine.sleep(nbytes / gb_s / 1e3)

    with machine.first_of_many(world), brief(occupy):
        sizes = sizes_for(machine, LARGE)
        model, optimizer = made(machine, name, sizes, world)
        tokens = tokens_of(machine, sizes, length if machine.is_real else 8)
        return _milliseconds(machine, lambda: train(model, optimizer, tokens), WARM_UP, ROUNDS)


RATES = {"NVLink": 370.0, "400 Gbit/s": 45.0}
"""Gigabytes that a rank receives in a second."""


def wire(machine: Machine) -> Verdict:
    """SIMULATED wires: how much longer a step takes if collectives keep their streams busy.

    Unlike real collectives, these hardly contend for memory or multiprocessors.
    """
    figures = {}
    for name in NAMES:
        alone = machine.apart(measured, name, 1024)["step ms"]
        for wire, gb_s in RATES.items():
            found = machine.apart(measured, name, 1024, WORLD, gb_s)["step ms"]
            figures[f"{wire}, {name}"] = {"step ms": found, "exposed ms": found - alone}
    return Verdict(passed=True, figures=figures)


def speed(machine: Machine) -> Verdict:
    """Host and step time by how long sequences are, each contender in a process of its own.

    A collective is one small kernel, so waits for the network are not measured.
    """
    figures = {
        f"{regime}, {name}": machine.apart(measured, name, length)
        for regime, length in LENGTHS.items()
        for name in NAMES
    }
    return Verdict(passed=True, figures=figures)
