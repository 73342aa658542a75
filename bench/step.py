"""Step time on two gloo ranks of one thread each, against PyTorch's own.

All contenders live in one pair of processes and take their steps in turn, so that whatever the
machine does to one it does to all; a figure is a ratio of medians. The processor time of a rank is
told as well, as a share of the same step time: with a core for each rank no step can be shorter.
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from bench.contenders import CONTENDERS, FLAT, FSDP1, FSDP2, PER_PARAMETER, RAGGED, Contender
from bench.machine import Loaded, LoadGuard, table
from bench.models import GPT, SHAPES, Shape

__all__ = ["WORLD", "Shares", "figures", "measured", "one_step", "report"]

Shares: TypeAlias = dict[str, dict[str, float]]
"""By model and contender: a time as a share of FSDP2's step."""

WORLD = 2
WARM_UP, ROUNDS = 4, 20
BOUNDS = {
    RAGGED: {"deep": 0.55, "wide": 0.58, "many tiny": 0.33},
    PER_PARAMETER: {"deep": 0.75, "wide": 0.80, "many tiny": 0.55},
}
"""Largest shares of FSDP2's step that are aimed at."""
FLAT_BOUND = 0.65
"""Largest share of FSDP1's step that the flat face aims at."""


class Seconds(NamedTuple):
    """What one training step took."""

    step: float
    processor: float
    """Of all threads of the process."""


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Seconds:
    """Take one training step."""
    start, busy = time.perf_counter(), time.process_time()
    model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    return Seconds(time.perf_counter() - start, time.process_time() - busy)


def measure(shape: Shape, contenders: dict[str, Contender], guard: LoadGuard) -> dict[str, Seconds]:
    """Medians of every contender's steps on this rank."""
    torch.manual_seed(0)
    base = GPT(shape)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1))
    runs = {name: one.make(copy.deepcopy(base)) for name, one in contenders.items()}
    seconds: dict[str, list[Seconds]] = {name: [] for name in runs}
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
    return {
        name: Seconds(*map(statistics.median, zip(*taken, strict=True)))
        for name, taken in seconds.items()
    }


def everyone() -> dict[str, Contender]:
    """Return all contenders as they are."""
    return CONTENDERS


def worker(rank: int, store: str, results: str, who: Callable[[], dict[str, Contender]]) -> None:
    """One rank."""
    contenders = who()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    guard = LoadGuard()
    found = {name: measure(shape, contenders, guard) for name, shape in SHAPES.items()}
    dist.barrier()
    guard.sample()
    drift = guard.worst()
    if rank == 0:
        Path(results).write_text(json.dumps({"seconds": found, "drift": drift}))
    dist.destroy_process_group()


def figures() -> dict[str, Shares]:
    """By kind of time: shares of FSDP2's step.

    Raises:
        Loaded: the machine was not idle.
    """
    return measured(everyone)


def measured(who: Callable[[], dict[str, Contender]]) -> dict[str, Shares]:
    """Let those that ``who`` returns on each rank train, FSDP2 among them; see ``figures``."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        mp.spawn(worker, (f"{folder}/store", str(results), who), nprocs=WORLD)
        found = json.loads(results.read_text())
    if found["drift"] > LoadGuard.tolerance:
        raise Loaded(found["drift"])
    return {
        kind: {
            shape: {name: taken[i] / seconds[FSDP2][0] for name, taken in seconds.items()}
            for shape, seconds in found["seconds"].items()
        }
        for i, kind in enumerate(Seconds._fields)
    }


def report(found: dict[str, Shares]) -> int:
    """Print the tables; how many bounds were missed."""
    for kind, by_shape in found.items():
        print(f"{kind} time as a share of torch {torch.__version__} FSDP2's step, {WORLD} ranks\n")
        rows = [
            [shape, *(f"{shares[c]:.2f}" for c in CONTENDERS)] for shape, shares in by_shape.items()
        ]
        print(table(["model", *CONTENDERS], rows), end="\n\n")
    steps = found["step"]
    missed = [
        f"{name}, {shape}: {steps[shape][name]:.2f} (bound {bound})"
        for name, bounds in BOUNDS.items()
        for shape, bound in bounds.items()
        if steps[shape][name] > bound
    ]
    flat = {shape: shares[FLAT] / shares[FSDP1] for shape, shares in steps.items()}
    told = ", ".join(f"{shape} {share:.2f}" for shape, share in flat.items())
    print(f"{FLAT}, as a share of {FSDP1}'s step: {told}")
    missed += [
        f"{FLAT}, {shape}: {share:.2f} of {FSDP1} (bound {FLAT_BOUND})"
        for shape, share in flat.items()
        if share > FLAT_BOUND
    ]
    print(f"bounds missed: {'; '.join(missed) or 'none'}")
    return len(missed)
