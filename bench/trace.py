"""What a trace costs: step time on two gloo ranks with it, as a share of that without it.

Both take their steps in turn on the same model in the same processes, so that whatever the machine
does to one it does to the other; a figure is a ratio of medians. Starting and stopping, which
happen once, are not in it.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fullshard
from bench.contenders import CONTENDERS, RAGGED
from bench.machine import Loaded, LoadGuard, table
from bench.models import GPT, SHAPES, Shape
from bench.step import WORLD, one_step

__all__ = ["figures", "report"]

WARM_UP, ROUNDS, STEPS = 2, 20, 5
BOUND = 1.02
"""Largest share of the step without a trace that is aimed at."""


def measure(shape: Shape, guard: LoadGuard, folder: str) -> float:
    """The share on this rank: the mean of a round's steps, with a trace and without."""
    torch.manual_seed(0)
    model, optimizer = CONTENDERS[RAGGED].make(GPT(shape))
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1))
    trace = fullshard.trace(model, folder)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(WARM_UP + ROUNDS):
        if number % (ROUNDS // 4) == WARM_UP:
            dist.barrier()
            guard.sample()
        for traced in (False, True):
            if traced:
                trace.start()
            dist.barrier()
            taken = [one_step(model, optimizer, tokens).step for _ in range(STEPS)]
            if traced:
                trace.stop()
            if number >= WARM_UP:
                seconds[traced].append(statistics.fmean(taken))
    return statistics.median(seconds[True]) / statistics.median(seconds[False])


def worker(rank: int, store: str, folder: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    guard = LoadGuard()
    found = {name: measure(shape, guard, folder) for name, shape in SHAPES.items()}
    drift = guard.worst()
    if rank == 0:
        results = {"shares": found, "drift": drift}
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # threads of gloo may abort at the end of an interpreter


def figures() -> dict[str, float]:
    """By model: step time with a trace as a share of that without.

    Raises:
        Loaded: the machine was not idle.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (f"{folder}/store", folder), nprocs=WORLD)
        found = json.loads(Path(folder, "results.json").read_text())
    if found["drift"] > LoadGuard.tolerance:
        raise Loaded(found["drift"])
    shares: dict[str, float] = found["shares"]
    return shares


def report(found: dict[str, float]) -> int:
    """Print the table; how many bounds were missed."""
    print(f"step time with a trace as a share of that without, {WORLD} ranks\n")
    print(table(["model", "share"], [[name, f"{share:.3f}"] for name, share in found.items()]))
    missed = [name for name, share in found.items() if share > BOUND]
    print(f"\nbound: {BOUND}, missed: {', '.join(missed) or 'none'}")
    return len(missed)
