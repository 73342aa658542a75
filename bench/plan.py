"""Step times that plans predict, after the machine was measured, against those that are seen.

The hardware is measured by ``fullshard doctor --calibrate`` with as many ranks; then all jobs train
in turn in one set of processes, and a figure is the predicted time divided by the median of those
seen. Ten jobs are ordered by both.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fullshard
from bench.compare import in_turns, medians, on_ranks
from bench.machine import table
from bench.models import GPT, SHAPES
from bench.step import one_step
from fullshard.plan import hardware_of

WORLDS = (2, 4)
WARM_UP, ROUNDS = 3, 12
BOUND = 0.15
"""Largest difference of predicted and seen that is aimed at, as a share of the seen one."""
TIE = 0.10
"""Jobs whose seen times differ by less are not ordered."""


@dataclass(frozen=True)
class Job:
    """A model of ``bench.models``, and how its blocks are sharded."""

    shape: str
    options: tuple[tuple[str, Any], ...] = ()

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Make units of the blocks and the rest."""
        for block in model.blocks:  # type: ignore[union-attr]
            fullshard.fully_shard(block, mesh=mesh, **dict(self.options))
        fullshard.fully_shard(model, mesh=mesh, **dict(self.options))

    def tokens(self) -> Tensor:
        """A batch."""
        shape = SHAPES[self.shape]
        return torch.zeros(shape.batch, shape.length + 1, dtype=torch.long)


RAGGED = (("layout", fullshard.Ragged()),)
KEPT = (("reshard_after_forward", False),)
JOBS = {
    **{name: Job(name) for name in SHAPES},
    **{f"{name}, ragged": Job(name, RAGGED) for name in SHAPES},
    **{f"{name}, kept": Job(name, KEPT) for name in SHAPES},
    "deep, ragged and kept": Job("deep", (*RAGGED, *KEPT)),
}


def sgd(params: Any) -> torch.optim.Optimizer:
    """An optimizer on runs of neighbours, whose host time is small beside that of the step."""
    return fullshard.optim.ShardedOptimizer(params, torch.optim.SGD, lr=1e-3)


def seen() -> dict[str, float]:
    """Return the medians of all jobs' steps on this rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    steps = {}
    for name, job in JOBS.items():
        torch.manual_seed(0)
        model = GPT(SHAPES[job.shape])
        job.shard(model, mesh)
        steps[name] = partial(one_step, model, sgd(model.parameters()), job.tokens())
    taken = medians(in_turns(steps, warm_up=WARM_UP, rounds=ROUNDS, samples=4))
    return {name: one.step for name, one in taken.items()}


def predicted(world: int) -> dict[str, float]:
    """Return the predictions of plans for the same jobs on the measured hardware."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hardware.json"
        command = [sys.executable, "-m", "fullshard.cli", "doctor", "--nproc", str(world)]
        subprocess.run(
            [*command, "--calibrate", str(file)],
            stdout=subprocess.DEVNULL,
            timeout=300,
            check=False,
        )
        hardware = hardware_of(file) if file.exists() else None
    if hardware is None:
        raise RuntimeError("fullshard doctor wrote no hardware")
    return {name: step_s(job, world, hardware) for name, job in JOBS.items()}


def step_s(job: Job, world: int, hardware: Any) -> float:
    """The planned time of a step."""
    plan: Callable[..., Any] = fullshard.plan
    with torch.device("meta"):
        model = GPT(SHAPES[job.shape])
    found = plan(
        model, batch=job.tokens(), world_size=world, hardware=hardware, shard=job.shard,
        optimizer=sgd,
    )  # fmt: skip
    return float(found.step_s)


def figures() -> dict[str, dict[str, dict[str, float]]]:
    """By number of ranks and job: predicted and seen seconds, and their ratio.

    Raises:
        Loaded: the machine was not idle.
    """
    found = {}
    for world in WORLDS:
        told, taken = predicted(world), on_ranks(seen, world)[0]
        found[str(world)] = {
            name: {"predicted_s": told[name], "seen_s": taken[name],
                   "ratio": told[name] / taken[name]}
            for name in JOBS
        }  # fmt: skip
    return found


def report(found: dict[str, dict[str, dict[str, float]]]) -> int:
    """Print the tables; how many predictions and pairs were wrong."""
    missed = []
    for world, jobs in found.items():
        rows = [
            [name, f"{one['predicted_s'] * 1e3:.1f}", f"{one['seen_s'] * 1e3:.1f}",
             f"{one['ratio']:.2f}"]
            for name, one in jobs.items()
        ]  # fmt: skip
        print(f"milliseconds of a step, {world} ranks, torch {torch.__version__}\n")
        print(table(["job", "predicted", "seen", "ratio"], rows), end="\n\n")
        missed += [f"{world}: {n} {o['ratio']:.2f}" for n, o in jobs.items()
                   if abs(o["ratio"] - 1) > BOUND]  # fmt: skip
        wrong = [
            f"{one} / {other}"
            for one, other in combinations(jobs, 2)
            if abs(jobs[one]["seen_s"] / jobs[other]["seen_s"] - 1) > TIE
            and (jobs[one]["seen_s"] < jobs[other]["seen_s"])
            != (jobs[one]["predicted_s"] < jobs[other]["predicted_s"])
        ]
        print(f"pairs in the wrong order: {'; '.join(wrong) or 'none'}\n")
        missed += wrong
    print(f"outside of {BOUND:.0%}, or in the wrong order: {len(missed)}")
    return len(missed)
