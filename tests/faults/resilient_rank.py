"""One rank of a small job that continues after losing other ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import Life, checkpoint, fully_shard, resilient
from fullshard.errors import CheckpointError
from tests.faults.rank import WIDTH, Model, Wire, begin, described, join
from tests.faults.rows import Fault, Phase, What
from tests.faults.strike import MESSAGE, Diary, Strike, watch_gathers

ROWS = 12
"""Rows of a batch over all ranks; divisible by worlds of 1 to 4 ranks."""
PATIENCE_S = 0.5


@dataclass(frozen=True)
class Stroke:
    """A fault of one member (a rank, by its original number) in one life of the job."""

    member: int
    life: int
    step: int
    fault: Fault


@dataclass(frozen=True)
class Plan:
    """A job and its faults.

    Attributes:
        every: number of steps between checkpoints.
        later: members killed from outside, with the seconds from the first stroke to the kill.
        hands_over: whether the state in memory is transferred from life to life.
        replicas: number of replicas of each shard; 1 in a life whose world it does not divide.
        copies: None for one shared folder. Otherwise each member is a machine with a folder of its
            own, whose files have this number of copies; every second checkpoint is on a shared
            disk.
    """

    world: int
    strokes: tuple[Stroke, ...] = ()
    later: tuple[tuple[int, float], ...] = ()
    wire: Wire = Wire.SHARED
    mode: str = "sync"
    steps: int = 7
    every: int = 2
    copies: int | None = None
    hands_over: bool = False
    replicas: int = 1

    @property
    def killed(self) -> set[int]:
        """The members that do not reach the end."""
        deadly = (What.KILL, What.OS_EXIT, What.STOP)
        struck = {one.member for one in self.strokes if one.fault.what in deadly}
        return struck | {member for member, _ in self.later}


def batch(step: int) -> Tensor:
    """Return all rows of a step's batch."""
    noise = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=noise, dtype=torch.float64)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Train on the rows ``x``."""
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def built(strike: Strike) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the unsharded model, and an optimizer for training without sharding."""
    torch.manual_seed(0)
    model = Model(strike).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def undisturbed(steps: int) -> Tensor:
    """Return the weights of a training in one process without faults."""
    model, optimizer = built(Strike())
    for step in range(1, steps + 1):
        one_step(model, optimizer, batch(step))
    return torch.cat([one.detach().flatten() for one in model.parameters()])


class Rank:
    """One member of the job."""

    def __init__(self, plan: Plan, member: int, folder: Path, diary: Diary) -> None:
        self.plan, self.member, self.folder, self.diary = plan, member, folder, diary
        self.strike = Strike()

    def train(self, life: Life) -> Tensor:
        """Train from the newest checkpoint with a loop like a user's; return the weights."""
        plan, strike = self.plan, self._strike(life.number)
        model, _ = built(strike)
        replicas = plan.replicas if life.world % plan.replicas == 0 else 1
        sizes = (replicas, life.world // replicas) if replicas > 1 else (life.world,)
        mesh = dist.init_device_mesh(
            "cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :]
        )
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer.register_step_pre_hook(lambda *_: strike.meet(Phase.OPTIMIZER))
        strike.meet(Phase.BUILD)
        savers = self._savers()
        first = self._loaded(life, savers, model, optimizer)
        self.diary.note("begins", life=life.number, world=life.world, step=first)
        for step in range(first + 1, plan.steps + 1):
            strike.step = step
            strike.meet(Phase.DATA)
            try:
                one_step(model, optimizer, batch(step).chunk(life.world)[life.rank])
            except RuntimeError as error:
                if strike.fault.what is not What.CAUGHT_ALONE or str(error) != MESSAGE:
                    raise
            life.reached(step)
            for saver in savers:
                if saver.is_due(step):
                    strike.meet(Phase.SAVE)
                    saver.save(model, optimizer, step=step)
                    break
        savers[0].wait()
        strike.meet(Phase.END)
        dist.barrier()  # the user's own collective, unknown to fullshard
        self.diary.note("restarts", lost=[one.lost for one in life.restarts])
        whole = checkpoint.full_state_dict(model, rank0_only=False)
        return torch.cat([one.detach().flatten() for one in whole.values()])

    def _savers(self) -> list[checkpoint.Checkpointer]:
        plan = self.plan
        make = partial(checkpoint.Checkpointer, mode=plan.mode)
        if plan.copies is None:
            return [make(self.folder / "checkpoints", every=plan.every, keep=2)]
        memory = self.folder / f"memory-{self.member}"  # no other member uses this folder
        return [
            make(self.folder / "checkpoints", every=2 * plan.every, keep=2),
            make(memory, every=plan.every, keep=1, copies=plan.copies),
        ]

    def _loaded(
        self,
        life: Life,
        savers: list[checkpoint.Checkpointer],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> int:
        """Load the newest checkpoint; return its step, or 0 if there is none."""
        try:
            load = life.load if self.plan.hands_over else checkpoint.load_newest
            loaded = load(savers, model, optimizer)
        except CheckpointError:
            if self.plan.copies is None:
                raise
            loaded = None  # all copies were lost before the first checkpoint on the disk
        path = "" if loaded is None else str(loaded.path)
        where = next((one for one in ("memory", "resilient") if one in path), "disk")
        self.diary.note("loads", step=loaded.step if loaded else 0, where=where)
        return loaded.step if loaded else 0

    def _strike(self, life: int) -> Strike:
        found = (one for one in self.plan.strokes if (one.member, one.life) == (self.member, life))
        stroke = next(found, None)
        strike = Strike()
        if stroke is not None:
            strike = Strike(stroke.fault, stroke.step, self.diary)
            strike.step = stroke.step if stroke.fault.phase is Phase.BUILD else 0
        self.strike.__dict__ = strike.__dict__  # ``watch_gathers`` keeps this object
        return self.strike


def work(plan: Plan, member: int, folder: str, port: int) -> None:
    """Run ``member`` of a job whose store is on ``port``, and end the process."""
    root = Path(folder)
    diary = begin(root, member, plan.wire, PATIENCE_S)
    ended: dict[str, Any] = {"kind": "", "text": ""}
    try:
        join(plan.world, member, port)
        rank = Rank(plan, member, root, diary)
        watch_gathers(rank.strike)
        weights = resilient(rank.train, max_restarts=4)
        torch.save(weights, root / f"weights-{member}.pt")
    except BaseException as error:
        ended = described(error)
    diary.note("ended", **ended)
    os._exit(0)
