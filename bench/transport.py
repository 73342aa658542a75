"""Gloo's own collectives against sends in pairs, by size and world: why ``comm`` uses pairs."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from bench.machine import table
from fullshard.comm import Pending
from fullshard.comm.c10d import C10d, Transport

__all__ = ["main"]

SIZES = (1_000, 30_000, 300_000, 1_000_000, 7_000_000)


def worker(rank: int, world: int, store: str) -> None:
    """Measure on one rank; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    assert dist.group.WORLD is not None
    wires = {t: C10d(dist.group.WORLD, "cpu", t) for t in Transport}
    rows = []
    for numel in SIZES:
        part, whole = torch.ones(numel // world), torch.ones(numel // world * world)
        cases: dict[str, Callable[[], None]] = {}
        for transport, wire in wires.items():
            cases[f"gather {transport.value}"] = partial(run, wire.all_gather, whole, part)
            cases[f"reduce {transport.value}"] = partial(run, wire.reduce_scatter_mean, part, whole)
        taken = interleaved(cases, rounds=25 if numel > 100_000 else 80)
        rows.append(
            [
                f"{4 * numel / 1e6:.3f} MB",
                *(
                    f"{taken[f'{kind} pairs'] / taken[f'{kind} native']:.2f}"
                    for kind in ("gather", "reduce")
                ),
            ]
        )
    if rank == 0:
        print(f"\n{world} ranks: time of pairs as a share of native\n")
        print(table(["unsharded fp32", "all-gather", "reduce-scatter"], rows), flush=True)
    dist.destroy_process_group()


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


def main() -> int:
    """Print the tables."""
    for world in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (world, f"{folder}/store"), nprocs=world)
    return 0
