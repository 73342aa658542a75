"""Saving and loading a checkpoint of 370 MB, two gloo ranks of one thread each, on a local disk.

Three more figures: how long training stands still for an asynchronous save, how much slower steps
are during the save, and how long it takes to describe a checkpoint of many ranks. Written files are
flushed to the disk; files that are read are in memory already.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import Shard
from torch.optim import AdamW, Optimizer

import fullshard
from bench.compare import medians, on_ranks, verdict
from bench.machine import idle, table
from bench.models import GPT, Shape
from fullshard.checkpoint.format.manifest import (
    Contents,
    FileInfo,
    Manifest,
)
from fullshard.checkpoint.format.placement import Grid, TensorEntry
from fullshard.tensors import RaggedShard

WORLD = 2
ROUNDS = 10  # the first one, whose memory is new to the kernel, does not count
SHAPE = Shape(vocab=4096, dim=768, layers=4, heads=12, length=64, batch=1)
OURS, DCP, DISK = "fullshard", "torch.distributed.checkpoint", "the disk alone"
NOTHING = "no save"
STEPS = 4
PLANNED = 1000
VALUES: dict[str, Any] = {"ties": {}, "states": {}}
BOUND = 1.0  # of DCP
STALL = 0.1  # of a sync save
SLOWER = 1.1


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
    data = memoryview(bytearray(os.urandom(nbytes)))  # zeros may cost nothing
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


class Save(NamedTuple):
    """A save that runs during training."""

    is_done: Callable[[], bool]
    wait: Callable[[], object]


def beside(folder: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Callable[[], Save]]:
    """Return functions that begin a save during training, by contender."""
    group = dist.new_group(backend="gloo")  # its collectives come in between the training's

    ours = fullshard.checkpoint.Checkpointer(folder / "ours", mode="async")

    def own() -> Save:
        save = ours.save(model, optimizer, step=1)
        return Save(lambda: save.is_done, save.wait)

    def theirs() -> Save:
        state, optim = get_state_dict(model, optimizer)
        found = dcp.async_save(
            {"model": state, "optim": optim}, checkpoint_id=folder / "dcp", process_group=group
        )
        return Save(found.done, found.result)

    return {OURS: own, DCP: theirs, NOTHING: lambda: Save(lambda: True, lambda: None)}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds until all ranks have called, and the result of the call here."""
    dist.barrier()
    start = time.perf_counter()
    found = call()
    dist.barrier()
    return time.perf_counter() - start, found


def empty(root: Path) -> None:
    """Remove everything, and wait until the disk is idle; the first rank does."""
    dist.barrier()
    if dist.get_rank() == 0:
        for one in root.iterdir():
            shutil.rmtree(one) if one.is_dir() else one.unlink()
        os.sync()
    dist.barrier()


def work(folder: str) -> dict[str, float]:
    """Return the median seconds on this rank, and the bytes of a checkpoint."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    fullshard.shard_blocks(model)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(SHAPE.vocab, (SHAPE.batch, SHAPE.length + 1))

    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    own = sum(param.to_local().nbytes for param in model.parameters())  # type: ignore[operator]
    root = Path(folder)
    kinds = {
        OURS: ours(root / "ours", model, optimizer),
        DCP: dcps(root / "dcp", model, optimizer),
        DISK: disks(root / "disk", 3 * own),
    }
    asides = beside(root, model, optimizer)
    seconds: dict[str, list[float]] = {}
    for number in range(ROUNDS):
        if number == 1:
            seconds.clear()
        first = number % len(kinds)  # a disk may be slower just after a write
        for name in [*kinds][first:] + [*kinds][:first]:
            calls = kinds[name]
            for what, call in zip(("save", "load"), calls, strict=True):
                seconds.setdefault(f"{what} {name}", []).append(timed(call)[0])
            empty(root)
        for name, begin in asides.items():
            stall, save = timed(begin)
            first, _ = timed(step)  # waits for copies
            for _ in range(STEPS):
                was_done = save.is_done()
                taken, _ = timed(step)
                if name == NOTHING or not was_done:
                    seconds.setdefault(f"step {name}", []).append(taken)
            save.wait()
            seconds.setdefault(f"stall {name}", []).append(stall + first)
            empty(root)
    return {**medians(seconds), "nbytes": 3 * own * WORLD}


def planning() -> dict[str, float]:
    """Seconds to describe 1,000 tensors on 1,000 ranks, for each rank and for the first besides."""
    grid = Grid((PLANNED,), tuple(range(PLANNED)))
    placed = {
        "rows": Shard(0),
        "ragged": RaggedShard([(1, PLANNED + at % 2) for at in range(PLANNED)]),
    }
    found = {}
    for name, placement in placed.items():
        shape = (PLANNED, PLANNED) if name == "rows" else (sum(n for _, n in placement.lengths),)
        start = time.perf_counter()
        entries = {
            f"model/layers.{at}.weight": TensorEntry("float32", shape, grid, (placement,), 0)
            for at in range(PLANNED)
        }
        for entry in entries.values():
            entry.region(7)
        text = json.dumps(Contents(entries, VALUES).to_json())
        found[f"plan {name}, a rank"] = time.perf_counter() - start
        start = time.perf_counter()
        contents = Contents.from_json(json.loads(text), PLANNED)
        files = [FileInfo(f"rank-{rank:05d}", rank, 10**9, "0" * 32, 0) for rank in grid.ranks]
        manifest = Manifest(1, 0.0, {}, [contents], files, None)
        manifest.check()
        manifest.to_json()
        found[f"plan {name}, the first"] = time.perf_counter() - start
    return found


def figures() -> dict[str, float]:
    """By contender, its time for saving and for loading in seconds, and the bytes.

    Raises:
        Loaded: the machine was not idle.
    """
    with tempfile.TemporaryDirectory() as folder, idle():
        return on_ranks(work, WORLD, folder, has_server=True)[0] | planning()


def report(found: dict[str, float]) -> int:
    """Print the tables; how many bounds were missed."""
    rows, missed = [], []
    for what in ("save", "load"):
        mine, theirs, disk = (found[f"{what} {name}"] for name in (OURS, DCP, DISK))
        rows.append([what, f"{mine / theirs:.2f}", f"{disk / mine:.2f}", f"{disk / theirs:.2f}"])
        missed += [what] if mine > BOUND * theirs else []
    print(f"a checkpoint of {found['nbytes'] / 1e6:.0f} MB, {WORLD} ranks\n")
    print(table(["", "time, of DCP's", "speed, of the disk's", "the same of DCP"], rows))
    alone = found[f"step {NOTHING}"]
    rows = []
    for name in (OURS, DCP):
        stall = (found[f"stall {name}"] - found[f"stall {NOTHING}"]) / found[f"save {name}"]
        slower = found.get(f"step {name}", alone) / alone
        rows.append([name, f"{stall:.2f}", f"{slower:.2f}"])
        if name == OURS:
            missed += ["stall"] if stall > STALL else []
            missed += ["steps beside a save"] if slower > SLOWER else []
    header = [
        "async",
        "time that training stands still, of its sync save",
        "steps beside it, of others",
    ]
    print()
    print(table(header, rows))
    print()
    plans = {name: value for name, value in found.items() if name.startswith("plan ")}
    print(
        table(
            [f"{PLANNED} tensors, {PLANNED} ranks", "s"],
            [[n, f"{v:.2f}"] for n, v in plans.items()],
        )
    )
    missed += [name for name, value in plans.items() if value > 1.0]
    return verdict(missed)
