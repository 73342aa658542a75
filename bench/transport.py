"""Gloo's own collectives against shared memory and our messages: why ``comm`` uses these."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from bench.machine import idle, table
from fullshard.comm import Pending
from fullshard.comm.c10d import C10d, Transport
from fullshard.comm.meeting import SWITCH

__all__ = ["figures", "report"]

NATIVE = "native"
SIZES = (1_000, 30_000, 300_000, 1_000_000, 7_000_000)


def worker(rank: int, world: int, store: str, results: str) -> None:
    """Measure on one rank; rank 0 writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    assert dist.group.WORLD is not None
    wires = {
        NATIVE: C10d(dist.group.WORLD, "cpu", Transport.NATIVE),
        "shared": C10d(dist.group.WORLD, "cpu", Transport.SHARED),
        "messages": alone(dist.new_group()),
    }
    found = {}
    for numel in SIZES:
        part, whole = torch.ones(numel // world), torch.ones(numel // world * world)
        cases: dict[str, Callable[[], None]] = {}
        for name, wire in wires.items():
            cases[f"gather {name}"] = partial(run, gather_by(wire), whole, part)
            cases[f"reduce {name}"] = partial(run, wire.reduce_scatter_mean, part, whole)
        taken = interleaved(cases, rounds=25 if numel > 100_000 else 80)
        found[f"{4 * numel / 1e6:.3f} MB"] = {
            f"{kind}, {other}": taken[f"{kind} {other}"] / taken[f"{kind} {NATIVE}"]
            for other in wires
            if other != NATIVE
            for kind in ("gather", "reduce")
        }
    if rank == 0:
        Path(results).write_text(json.dumps(found))
    dist.destroy_process_group()


def alone(group: dist.ProcessGroup) -> C10d:
    """The wire of ranks that share no memory, as if each were on a host of its own."""
    wire = C10d(group, "cpu")
    os.environ[SWITCH] = "0"
    assert wire.adds_wide  # the ranks meet
    del os.environ[SWITCH]
    return wire


def gather_by(wire: C10d) -> Callable[[Tensor, Tensor], Pending]:
    """An all-gather of one tensor."""
    return lambda output, source: wire.all_gather([output], [source])


def run(start: Callable[[Tensor, Tensor], Pending], output: Tensor, source: Tensor) -> None:
    """One collective, from start to end."""
    start(output, source).wait()


def interleaved(cases: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each case, one after the other in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            dist.barrier()
            start = time.perf_counter()
            case()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def figures() -> dict[str, dict[str, dict[str, float]]]:
    """By world, unsharded bytes, collective and transport: its time as a share of gloo's own.

    Raises:
        Loaded: the machine was not idle.
    """
    found = {}
    with idle():
        for world in (2, 4):
            with tempfile.TemporaryDirectory() as folder:
                results = Path(folder) / "results.json"
                mp.spawn(worker, (world, f"{folder}/store", str(results)), nprocs=world)
                found[str(world)] = json.loads(results.read_text())
    return found


def report(found: dict[str, dict[str, dict[str, float]]]) -> int:
    """Print the table; nothing is promised."""
    print("time as a share of that of gloo's own collectives\n")
    for world, by_size in found.items():
        kinds = list(next(iter(by_size.values())))
        rows = [[size, *(f"{one[kind]:.2f}" for kind in kinds)] for size, one in by_size.items()]
        print(table([f"{world} ranks, unsharded fp32", *kinds], rows), end="\n\n")
    return 0
