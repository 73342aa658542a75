"""Saving and loading a checkpoint of 370 MB, two gloo ranks of one thread each, on a local disk.

Everything is flushed to the disk when it is written; what is read is in memory already.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import AdamW, Optimizer

import fullshard
from bench.machine import idle, table
from bench.models import GPT, Shape

__all__ = ["figures", "report"]

WORLD = 2
ROUNDS = 5
SHAPE = Shape(vocab=4096, dim=768, layers=4, heads=12, length=64, batch=1)
OURS, DCP, DISK = "fullshard", "torch.distributed.checkpoint", "the disk alone"
BOUND = 1.0  # of DCP


def ours(folder: Path, model: nn.Module, optimizer: Optimizer) -> tuple[Callable[[], object], ...]:
    """Return save and load of fullshard."""
    return (
        lambda: fullshard.checkpoint.save(folder, model, optimizer, step=1),
        lambda: fullshard.checkpoint.load(folder, model, optimizer),
    )


def dcps(folder: Path, model: nn.Module, optimizer: Optimizer) -> tuple[Callable[[], object], ...]:
    """Return save and load of PyTorch."""

    def save() -> None:
        state, optim = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optim": optim}, checkpoint_id=folder)

    def load() -> None:
        state, optim = get_state_dict(model, optimizer)
        found = {"model": state, "optim": optim}
        dcp.load(found, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optim"],
        )

    return save, load


def disks(folder: Path, nbytes: int) -> tuple[Callable[[], object], ...]:
    """Return a write and a read of ``nbytes`` on each rank."""
    data = memoryview(bytearray(nbytes))
    file = folder / str(dist.get_rank())

    def save() -> None:
        folder.mkdir(exist_ok=True)
        with file.open("wb", buffering=0) as opened:
            for start in range(0, nbytes, 4 << 20):
                opened.write(data[start : start + (4 << 20)])
            os.fsync(opened.fileno())

    def load() -> None:
        with file.open("rb", buffering=0) as opened:
            for start in range(0, nbytes, 4 << 20):
                opened.readinto(data[start : start + (4 << 20)])

    return save, load


def worker(rank: int, store: str, folder: str, results: str) -> None:
    """One rank; rank 0 writes median seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    model = GPT(SHAPE)
    fullshard.shard_blocks(model)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model(torch.randint(SHAPE.vocab, (SHAPE.batch, SHAPE.length + 1))).backward()
    optimizer.step()
    own = sum(param.to_local().nbytes for param in model.parameters())  # type: ignore[operator]
    root = Path(folder)
    kinds = {
        OURS: ours(root / "ours", model, optimizer),
        DCP: dcps(root / "dcp", model, optimizer),
        DISK: disks(root / "disk", 3 * own),
    }
    seconds: dict[str, list[float]] = {
        f"{what} {name}": [] for what in ("save", "load") for name in kinds
    }
    for _ in range(ROUNDS):
        for name, calls in kinds.items():
            for what, call in zip(("save", "load"), calls, strict=True):
                dist.barrier()
                start = time.perf_counter()
                call()
                dist.barrier()
                seconds.setdefault(f"{what} {name}", []).append(time.perf_counter() - start)
            dist.barrier()
            if rank == 0:
                for one in root.iterdir():
                    shutil.rmtree(one) if one.is_dir() else one.unlink()
            dist.barrier()
    if rank == 0:
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        Path(results).write_text(json.dumps({**medians, "nbytes": 3 * own * WORLD}))
    dist.barrier()
    os._exit(0)  # PyTorch's now and then aborts at the end


def figures() -> dict[str, float]:
    """By contender, its time for saving and for loading in seconds, and the bytes.

    Raises:
        Loaded: the machine was not idle.
    """
    with tempfile.TemporaryDirectory() as folder, idle():
        results = Path(folder) / "results.json"
        target = Path(folder) / "files"
        target.mkdir()
        mp.spawn(worker, (f"{folder}/store", str(target), str(results)), nprocs=WORLD)
        found: dict[str, float] = json.loads(results.read_text())
    return found


def report(found: dict[str, float]) -> int:
    """Print the table; how many bounds were missed."""
    rows, missed = [], []
    for what in ("save", "load"):
        mine, theirs, disk = (found[f"{what} {name}"] for name in (OURS, DCP, DISK))
        rows.append([what, f"{mine / theirs:.2f}", f"{disk / mine:.2f}", f"{disk / theirs:.2f}"])
        missed += [what] if mine > BOUND * theirs else []
    print(f"a checkpoint of {found['nbytes'] / 1e6:.0f} MB, {WORLD} ranks\n")
    print(table(["", "time, of DCP's", "speed, of the disk's", "the same of DCP"], rows))
    print(f"\nbounds missed: {', '.join(missed) or 'none'}")
    return len(missed)
