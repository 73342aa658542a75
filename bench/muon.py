"""``Muon`` against whole matrices on every rank, and against AdamW; a part of ``bench optimizer``.

Newton-Schulz runs in fp32, for which CPUs have fast products.
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
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from bench.contenders import sharded_adamw, units
from bench.launches import Launches
from bench.machine import table
from bench.models import GPT, SHAPES
from fullshard import fully_shard
from fullshard.optim import Muon
from fullshard.optim.muon.full import FullMuon

__all__ = ["figures", "report"]

GATHERED_WORLD, ADAMW_WORLD = 4, 2
WARM_UP, ROUNDS = 2, 6
STEP, BESIDE, KERNELS = "step", "beside Newton-Schulz", "kernels"
BOUNDS = {STEP: 0.35, BESIDE: 1.3}
"""Largest shares that are aimed at: of the step that gathers, and of AdamW's training step."""


class OnEveryRank:
    """What users write by hand: every rank gathers every matrix and steps all of it."""

    def __init__(self, matrices: list[nn.Parameter]) -> None:
        self._matrices = matrices
        self._wholes = [nn.Parameter(torch.zeros(param.shape)) for param in matrices]
        self._muon = FullMuon(self._wholes, ns_dtype="float32", batched=False)

    @torch.no_grad()
    def step(self) -> None:
        """Gather, step, and keep this rank's part."""
        for param, whole in zip(self._matrices, self._wholes, strict=True):
            assert isinstance(param, DTensor) and isinstance(param.grad, DTensor)
            whole.copy_(param.full_tensor())
            whole.grad = param.grad.full_tensor()
        self._muon.step()
        for param, whole in zip(self._matrices, self._wholes, strict=True):
            assert isinstance(param, DTensor)
            on_all = DTensor.from_local(whole.detach(), param.device_mesh, [Replicate()])
            param.copy_(on_all.redistribute(placements=param.placements))


def gathered(world: int) -> dict[str, float]:
    """Seconds and kernels of the optimizer's step of the deep model, ours and by hand."""
    torch.manual_seed(0)
    base = GPT(SHAPES["deep"])
    ours, theirs = copy.deepcopy(base), copy.deepcopy(base)
    units(fully_shard)(ours)
    units(torch_fully_shard)(theirs)
    muon = Muon(ours, ns_dtype=torch.float32, rule=_only_blocks)
    by_hand = OnEveryRank([p for p in theirs.blocks.parameters() if p.dim() == 2])
    for model in (ours, theirs):
        for param in model.parameters():
            whole = torch.randn(param.shape)
            assert isinstance(param, DTensor)
            param.grad = distribute_tensor(whole, param.device_mesh, param.placements)
    seconds: dict[str, list[float]] = {"ours": [], "by hand": []}
    launched: dict[str, int] = {}
    for number in range(WARM_UP + ROUNDS):
        for name, one in (("ours", muon), ("by hand", by_hand)):
            dist.barrier()
            start = time.perf_counter()
            one.step()  # type: ignore[attr-defined]
            dist.barrier()  # owners end at other times
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    for name, one in (("ours", muon), ("by hand", by_hand)):
        with Launches() as counter:
            one.step()  # type: ignore[attr-defined]
        launched[name] = counter.kernels
    dist.barrier()
    found = {name: statistics.median(taken) for name, taken in seconds.items()}
    return {
        STEP: found["ours"] / found["by hand"],
        KERNELS: launched["ours"],
        f"{KERNELS} by hand": launched["by hand"],
    }


def _only_blocks(name: str, info: Any) -> str | None:
    """Let both step the same matrices; everything else is AdamW's, here of nobody."""
    return "adamw" if not name.startswith("blocks.") else None


def beside(world: int) -> dict[str, float]:
    """A training step of the wide model with Muon without iterations, as a share of AdamW's."""
    torch.manual_seed(0)
    shape = SHAPES["wide"]
    base = GPT(shape)
    models = [units(fully_shard)(copy.deepcopy(base)) for _ in range(2)]
    optimizers = [
        Muon(models[0], ns_steps=0, ns_dtype=torch.float32),
        sharded_adamw(models[1].parameters()),
    ]
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1))
    seconds: list[list[float]] = [[], []]
    for number in range(WARM_UP + 2 * ROUNDS):
        for model, optimizer, taken in zip(models, optimizers, seconds, strict=True):
            dist.barrier()
            start = time.perf_counter()
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number >= WARM_UP:
                taken.append(time.perf_counter() - start)
    muon, adamw = map(statistics.median, seconds)
    return {BESIDE: muon / adamw}


def worker(rank: int, store: str, results: str, world: int) -> None:
    """One rank; rank 0 writes what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    found = gathered(world) if world == GATHERED_WORLD else beside(world)
    if rank == 0:
        Path(results).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def figures() -> dict[str, float]:
    """Shares of the two steps, and how many kernels ours launches on the first rank."""
    found: dict[str, float] = {}
    for world in (GATHERED_WORLD, ADAMW_WORLD):
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results.json"
            mp.spawn(worker, (f"{folder}/store", str(results), world), nprocs=world)
            found |= json.loads(results.read_text())
    return found


def report(found: dict[str, float]) -> int:
    """Print the table; how many bounds were missed."""
    print("\nMuon: its step as a share of that with full_tensor() on every rank (deep, 4 ranks);")
    print("a training step without iterations as a share of AdamW's (wide, 2 ranks)\n")
    shares = [f"{found[name]:.2f}" for name in (STEP, BESIDE)]
    counts = [f"{found[name]:.0f}" for name in (KERNELS, f"{KERNELS} by hand")]
    print(table([STEP, BESIDE, KERNELS, f"{KERNELS} by hand"], [[*shares, *counts]]))
    missed = [name for name, bound in BOUNDS.items() if found[name] > bound]
    print(f"\nbounds missed: {', '.join(missed) or 'none'}")
    return len(missed)
