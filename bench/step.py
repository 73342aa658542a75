"""Step time on two gloo ranks of one thread each, against PyTorch's own.

All contenders live in one pair of processes and take their steps in turn, so that whatever the
machine does to one it does to all; a figure is a ratio of medians.
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from bench.contenders import CONTENDERS, FSDP2, PER_PARAMETER, RAGGED
from bench.machine import Loaded, LoadGuard, table
from bench.models import GPT, SHAPES, Shape

__all__ = ["figures", "one_step", "report"]

WORLD = 2
WARM_UP, ROUNDS = 4, 20
BOUNDS = {
    RAGGED: {"deep": 0.55, "wide": 0.58, "many tiny": 0.33},
    PER_PARAMETER: {"deep": 0.75, "wide": 0.80, "many tiny": 0.55},
}
"""Largest shares of FSDP2's step that are aimed at."""


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    """Seconds of one training step."""
    start = time.perf_counter()
    model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def measure(shape: Shape, guard: LoadGuard) -> dict[str, float]:
    """Median step seconds of every contender on this rank."""
    torch.manual_seed(0)
    base = GPT(shape)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1))
    runs = {name: one.make(copy.deepcopy(base)) for name, one in CONTENDERS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(WARM_UP + ROUNDS):
        if number % (ROUNDS // 4) == WARM_UP:
            dist.barrier()  # all ranks at once, or the others' steps would be measured too
            guard.sample()
            dist.barrier()
        for name, (model, optimizer) in runs.items():
            dist.barrier()
            taken = one_step(model, optimizer, tokens)
            if number >= WARM_UP:
                seconds[name].append(taken)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def worker(rank: int, store: str, results: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    guard = LoadGuard()
    found = {name: measure(shape, guard) for name, shape in SHAPES.items()}
    dist.barrier()
    guard.sample()
    drifts: list[Any] = [None] * WORLD
    dist.all_gather_object(drifts, guard.drift)
    if rank == 0:
        Path(results).write_text(json.dumps({"seconds": found, "drift": max(drifts)}))
    dist.destroy_process_group()


def figures() -> dict[str, dict[str, float]]:
    """By model and contender: its step as a share of FSDP2's.

    Raises:
        Loaded: the machine was not idle.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        mp.spawn(worker, (f"{folder}/store", str(results)), nprocs=WORLD)
        found = json.loads(results.read_text())
    if found["drift"] > LoadGuard.tolerance:
        raise Loaded(found["drift"])
    return {
        shape: {name: taken / seconds[FSDP2] for name, taken in seconds.items()}
        for shape, seconds in found["seconds"].items()
    }


def report(found: dict[str, dict[str, float]]) -> int:
    """Print the table; how many bounds were missed."""
    print(f"step time as a share of torch {torch.__version__} FSDP2's, {WORLD} gloo ranks\n")
    rows = [[shape, *(f"{shares[c]:.2f}" for c in CONTENDERS)] for shape, shares in found.items()]
    print(table(["model", *CONTENDERS], rows))
    missed = [
        f"{name}, {shape}: {found[shape][name]:.2f} (bound {bound})"
        for name, bounds in BOUNDS.items()
        for shape, bound in bounds.items()
        if found[shape][name] > bound
    ]
    print(f"\nbounds missed: {'; '.join(missed) or 'none'}")
    return len(missed)
