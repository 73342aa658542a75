"""Gloo's own collectives against shared memory: why ``comm`` uses it within a host."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from bench.machine import idle, table
from fullshard.comm import Pending
from fullshard.comm.c10d import C10d, Transport

__all__ = ["figures", "report"]

NATIVE = "native"
SIZES = (1_000, 30_000, 300_000, 1_000_000, 7_000_000)
WORLDS = (2, 4, 8, 16)
NUM_SMALL = 1_000
"""Elements of each rank's shard where the number of ranks grows."""


def wires_of(rank: int, world: int, store: str) -> dict[str, C10d]:
    """The collectives of gloo and of shared memory, in a new default group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    assert dist.group.WORLD is not None
    return {
        NATIVE: C10d(dist.group.WORLD, "cpu", Transport.NATIVE),
        "shared": C10d(dist.group.WORLD, "cpu", Transport.SHARED),
    }


def worker(rank: int, world: int, store: str, results: str) -> None:
    """Measure on one rank; rank 0 writes."""
    wires = wires_of(rank, world, store)
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


def worker_of_many(rank: int, world: int, store: str, results: str) -> None:
    """Measure the processor time of small collectives on one rank; rank 0 writes."""
    cases: dict[str, Callable[[], None]] = {}
    part, whole = torch.ones(NUM_SMALL), torch.ones(NUM_SMALL * world)
    for name, wire in wires_of(rank, world, store).items():
        cases[f"gather, {name}"] = partial(run, gather_by(wire), whole, part)
        cases[f"reduce, {name}"] = partial(run, wire.reduce_scatter_mean, part, whole)
    found = interleaved(cases, rounds=8, clock=time.process_time, repeats=50)
    if rank == 0:
        Path(results).write_text(json.dumps({one: 1e6 * found[one] for one in found}))
    dist.barrier()
    dist.destroy_process_group()


def gather_by(wire: C10d) -> Callable[[Tensor, Tensor], Pending]:
    """An all-gather of one tensor."""
    return lambda output, source: wire.all_gather([output], [source])


def run(start: Callable[[Tensor, Tensor], Pending], output: Tensor, source: Tensor) -> None:
    """One collective, from start to end."""
    start(output, source).wait()


def interleaved(
    cases: dict[str, Callable[[], None]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    repeats: int = 1,
) -> dict[str, float]:
    """Median seconds of each case, one after the other in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            dist.barrier()
            start = clock()
            for _ in range(repeats):
                case()
            seconds[name].append((clock() - start) / repeats)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def spawned(work: Callable[[int, int, str, str], None], world: int) -> dict[str, Any]:
    """What rank 0 of ``world`` processes that run ``work`` wrote."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        mp.spawn(work, (world, f"{folder}/store", str(results)), nprocs=world)
        return dict(json.loads(results.read_text()))


def figures() -> dict[str, dict[str, Any]]:
    """By world: gloo's share by size, and processor time by collective.

    ``sizes``: by world, unsharded bytes, collective and transport: its time as a share of gloo's
    own. ``ranks``: by world and collective, microseconds of processor time of rank 0.

    Raises:
        Loaded: the machine was not idle.
    """
    with idle():
        return {
            "sizes": {str(world): spawned(worker, world) for world in (2, 4)},
            "ranks": {str(world): spawned(worker_of_many, world) for world in WORLDS},
        }


def report(found: dict[str, dict[str, Any]]) -> int:
    """Print the tables; nothing is promised."""
    print("time as a share of that of gloo's own collectives\n")
    for world, by_size in found["sizes"].items():
        kinds = list(next(iter(by_size.values())))
        rows = [[size, *(f"{one[kind]:.2f}" for kind in kinds)] for size, one in by_size.items()]
        print(table([f"{world} ranks, unsharded fp32", *kinds], rows), end="\n\n")
    kinds = list(next(iter(found["ranks"].values())))
    rows = [
        [world, *(f"{one[kind]:.0f}" for kind in kinds)] for world, one in found["ranks"].items()
    ]
    print(f"µs of processor time of a rank, {4 * NUM_SMALL / 1000:.0f} kB a rank\n")
    print(table(["ranks", *kinds], rows), end="\n\n")
    return 0
