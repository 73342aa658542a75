"""The costs that ``bench.scale`` takes at several sizes; each function returns one of them."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fullshard
from bench import rounds, schedule
from bench.models import GPT, Shape
from fullshard.checkpoint import list_checkpoints
from fullshard.checkpoint.format import placement as entries
from fullshard.checkpoint.format.datafile import DataFile, DataWriter, LocalFile
from fullshard.checkpoint.format.examine import described
from fullshard.checkpoint.format.manifest import MANIFEST, Contents, FileInfo, Manifest
from fullshard.checkpoint.format.placement import Grid, TensorEntry
from fullshard.checkpoint.loading.read import Reader, WantedPart
from fullshard.comm.dry import dry_world, mirror_world
from fullshard.layout import ParamSpec, PerParameter, Ragged, planner
from fullshard.schedule import Scheduler, UnitState
from fullshard.tensors import parts
from fullshard.trace import rankfile
from fullshard.trace.report import combine
from fullshard.train.data import text as data

TENSORS = 1000
TINY = Shape(vocab=64, dim=16, layers=4, heads=2, length=8, batch=1)


def seconds(call: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def calls(call: Callable[[], object]) -> int:
    """Return how many functions ``call`` calls, those in C included."""
    count = 0

    def note(frame: object, event: str, _: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


# models


def _chain(units: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(units)))


def _sharded(model: Any, blocks: Any, world: int) -> Any:
    mesh = init_device_mesh("cpu", (world,))
    for block in blocks:
        fullshard.fully_shard(block, mesh=mesh, layout=Ragged())
    return fullshard.fully_shard(model, mesh=mesh, layout=Ragged())


def fully_shard(units: int) -> float:
    """Return the time to shard a model of so many units on meta."""
    with torch.device("meta"):
        model = _chain(units)
    with dry_world(8):
        return seconds(partial(_sharded, model, model, 8))


def _step(model: Any, blocks: Any, given: Any, world: int, cost: Callable[..., float]) -> float:
    """Return the cost of a step of rank 0, whose collectives send nothing."""
    with mirror_world(world):
        _sharded(model, blocks, world)
        optimizer = fullshard.optim.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.0)

        def step() -> None:
            model(given).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        return min(cost(step) for _ in range(3))


def step_of_ranks(cost: Callable[..., float], world: int) -> float:
    """Return the cost of a step of one of ``world`` ranks."""
    model = GPT(TINY)
    return _step(model, model.blocks, torch.zeros(1, 9, dtype=torch.long), world, cost)


def step_of_units(cost: Callable[..., float], units: int) -> float:
    """Return the cost of a step of a model of so many units."""
    model = _chain(units)
    return _step(model, model, torch.zeros(1, 8), 8, cost)


def scheduler(units: int) -> float:
    """Return the time of the scheduler in a step."""
    machine = Scheduler()
    machine.add(*(UnitState(unit, nbytes=1000) for unit in range(units)))
    machine.add(UnitState(units, nbytes=1000, num_inside=units))
    schedule.step(machine, units, 0)
    return min(seconds(partial(schedule.step, machine, units, task)) for task in (1, 2, 3))


def layout(world: int, params: int = 100) -> float:
    """Return the time to build layouts, which are proved meanwhile."""
    specs = [ParamSpec(f"{n}", (64 + n % 7, 96)) for n in range(params)]
    planner.plan.cache_clear()
    both = Ragged("row"), PerParameter()
    return seconds(lambda: [one.build(specs, world, 4) for one in both])


def plan(world: int) -> float:
    """Return the time to plan a small model."""
    with torch.device("meta"):
        model = GPT(TINY)
        batch = torch.zeros(1, 9, dtype=torch.long)
    return seconds(lambda: fullshard.plan(model, batch=batch, world_size=world))


# checkpoints


def manifest_of(world: int, first: FileInfo | None = None, *, step: int = 1) -> Manifest:
    """Return the manifest of a checkpoint of ``TENSORS`` tensors, each cut into rows."""
    grid = Grid((world,), tuple(range(world)))
    tensors = {
        f"model/blocks.{n}.weight": TensorEntry("float32", (world, 16), grid, (Shard(0),), 0)
        for n in range(TENSORS)
    }
    files = [FileInfo(f"rank-{n:05}.safetensors", n, 0, "0" * 32, 0) for n in range(world)]
    files[0] = first or files[0]
    for one in (entries._coordinates, parts._region_of, entries._has_all_ranks):
        one.cache_clear()
    values = {"ties": {}, "states": {}}
    return Manifest(step, 1e9 + step, {}, [Contents(tensors, values)], files, None)


def describe(world: int) -> float:
    """Return the time to write and read a manifest, and to describe the checkpoint."""
    manifest = manifest_of(world)
    return seconds(lambda: described(Path(), Manifest.from_json(manifest.to_json())))


@contextmanager
def _stored(world: int) -> Iterator[tuple[Path, Manifest]]:
    """Yield a folder with the file of rank 0, and the manifest of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-00000.safetensors"
        parts = {f"model/blocks.{n}.weight": (torch.float32, (1, 16)) for n in range(TENSORS)}
        with DataWriter(path, parts) as file:
            for name in parts:
                file.put(name, 0, torch.zeros(64, dtype=torch.uint8))
            nbytes, digest = file.finish()
        yield Path(folder), manifest_of(world, FileInfo(path.name, 0, nbytes, digest, 0))


def verify(world: int) -> float:
    """Return the time of a rank to verify its own data file."""
    with _stored(world) as (folder, manifest):
        info = manifest.files[0]

        def run() -> None:
            with DataFile(LocalFile(folder / info.name), info) as file:
                assert not list(file.verify(manifest.parts_in(info)))

        return seconds(run)


def load(world: int) -> float:
    """Return the time of a rank to load its own share."""
    with _stored(world) as (folder, manifest):

        def run() -> None:
            wanted = {
                name: WantedPart(manifest.entry(name).region(0), torch.empty(16))
                for name in manifest.names()
            }
            opened: Any = lambda info: LocalFile(folder / info.name)  # noqa: E731
            with Reader(opened, manifest, wanted, world=world) as reader:
                assert not reader.to_exchange()
                reader.read([])

        return seconds(run)


def at_root(count: int, cost: Callable[[Path], float]) -> float:
    """Return a cost in a folder of so many checkpoints of 8 ranks."""
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, count + 1):
            path = Path(folder) / f"step-{step:06}"
            path.mkdir()
            manifest = manifest_of(8, step=step)
            for file in manifest.files:
                (path / file.name).touch()
            (path / MANIFEST).write_bytes(manifest.to_json())
        return cost(Path(folder))


def list_root(count: int) -> float:
    """Return the time to list so many checkpoints."""
    return at_root(count, lambda root: seconds(lambda: list_checkpoints(root)))


def latest(count: int) -> float:
    """Return the time to find the newest of so many checkpoints."""
    return at_root(count, lambda root: seconds(lambda: fullshard.checkpoint.latest(root)))


# the store, text, traces


def requests(make: Callable[[int], Callable[[], None]], world: int) -> float:
    """Return the requests of a rank other than the one that collects; ranks are threads."""
    with rounds.many_threads(), rounds.ranks(world) as on_all:
        return on_all(make(world))["of any other rank"]


def answers(world: int, requests: int = 16, clients: int = 8) -> float:
    """Return the wall time in which one store answers so many requests of each rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connections = [dist.TCPStore("127.0.0.1", store.port, is_master=False) for _ in range(clients)]

    def ask(own: dist.Store) -> None:
        for _ in range(requests * world // clients):
            own.add("requests", 1)

    start = time.monotonic()
    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(ask, connections))
    return time.monotonic() - start


def text(nbytes: int, workers: int = 4) -> float:
    """Return the time of all workers of one machine, of which the first tokenizes."""
    random_words = random.Random(0)
    words = ["".join(random_words.choices("etaoinshr", k=5)) for _ in range(2000)]
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, XDG_CACHE_HOME=folder):
        texts = Path(folder) / "texts"
        texts.mkdir()
        for n in range(16):
            text = " ".join(random_words.choices(words, k=max(nbytes // 16 // 6, 1)))
            (texts / f"{n}.txt").write_text(text)
        load = partial(data.load_text, str(texts), vocab_size=1024)
        return seconds(lambda: [load() for _ in range(workers)])


def trace(cost: Callable[[Path], float], world: int, units: int = 500) -> float:
    """Return a cost of a trace in which each rank did 5 steps."""
    total = {"count": 1, "total_s": 0.1, "most_s": 0.1}
    one_unit = {
        "engine": 0, "unsharded_nbytes": 1 << 20, "shard_nbytes": 1 << 10, "encloses": False,
        "reduction_nbytes": 1 << 20, "shards": world, "after_forward": "auto",
    }  # fmt: skip
    actions = [
        [op, unit, unit * 1e-4, 1e-5, None, None]
        for unit in range(units)
        for op in ("unshard", "wait", "reshard", "reduce_scatter", "finish_reduce")
    ]
    step = {
        "duration_s": 0.1, "allocated_nbytes": None, "held": {}, "actions": actions, "work": [],
        "buffers": [], "missed": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            found = {
                "rank": rank, "world": world, "host": "here", "device": "cpu",
                "started": {"wall_ns": 10**18}, "ended": {"wall_ns": 2 * 10**18, "after_s": 1.0},
                "engines": [{"prefetch_budget": None, "reduction_budget": None}],
                "units": [{"name": f"blocks.{n}", **one_unit} for n in range(units)],
                "spent": {"step": total, "evaluation": total, "part": total},
                "totals": [{"gathers": 2, "gather": total, "reduction": total}] * units,
                "missed": [], "unfinished": None, "shortage": None, "plan": None,
                "steps": [{"number": n, "start_s": 0.1 * n, **step} for n in range(5)],
            }  # fmt: skip
            rankfile.write(Path(folder), rank, found)
        return cost(Path(folder))


def report_nbytes(folder: Path) -> float:
    """Return the size of the page of a report."""
    found = combine(folder)
    return float(found.page.stat().st_size)
