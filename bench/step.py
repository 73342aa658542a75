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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fullshard
from bench.machine import LoadGuard, table
from bench.models import GPT, SHAPES, Block, Shape

__all__ = ["main"]

WORLD = 2
WARM_UP, ROUNDS = 5, 40
BOUND = 0.85
"""Largest share of FSDP2's step that this version promises."""


def per_parameter(model: nn.Module, shard: Callable[..., Any]) -> nn.Module:
    """Blocks and root, one unit each."""
    for block in model.blocks:  # type: ignore[union-attr]
        shard(block)
    shard(model)
    return model


def flat(model: nn.Module) -> nn.Module:
    """PyTorch's FSDP1 with the same units."""
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


CONTENDERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "unsharded": lambda model: model,
    "torch FSDP1": flat,
    "torch FSDP2": partial(per_parameter, shard=torch_fully_shard),
    "fullshard": partial(per_parameter, shard=fullshard.fully_shard),
}


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
    runs = {}
    for name, prepare in CONTENDERS.items():
        model = prepare(copy.deepcopy(base))
        runs[name] = (model, torch.optim.AdamW(model.parameters(), lr=1e-3))
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


def main() -> int:
    """Print the table; 1 if the machine was loaded or a bound was missed."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        mp.spawn(worker, (f"{folder}/store", str(results)), nprocs=WORLD)
        found = json.loads(results.read_text())
    print(f"step time as a share of torch {torch.__version__} FSDP2's, {WORLD} gloo ranks\n")
    if found["drift"] > LoadGuard.tolerance:
        print(
            f"refused: the machine is loaded, a fixed matmul took up to {found['drift']:.0%} "
            "longer at times; try again when it is idle"
        )
        return 1
    rows = [
        [name, *(f"{seconds[c] / seconds['torch FSDP2']:.2f}" for c in CONTENDERS)]
        for name, seconds in found["seconds"].items()
    ]
    print(table(["model", *CONTENDERS], rows))
    shares = [s["fullshard"] / s["torch FSDP2"] for s in found["seconds"].values()]
    print(
        f"\nbound: {BOUND}, largest: {max(shares):.2f}, drift of the machine: {found['drift']:.1%}"
    )
    return int(max(shares) > BOUND)
