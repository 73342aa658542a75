"""One rank of a small job that saves after every step, and may be killed at any moment."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fullshard import PerParameter, Ragged, checkpoint, fully_shard
from tests.faults.rank import Wire, begin, join

LAYOUTS = {"rows": PerParameter(), "ragged": Ragged()}
KEEP = 2
_PATIENCE_S = 0.2
_JOINS_S = 20.0  # time limit for joining, as another rank may have been killed before it joined


class Training(NamedTuple):
    """A training of some steps with one of ``LAYOUTS``."""

    layout: str
    world: int = 2
    steps: int = 12


def work(job: Training, rank: int, folder: str, port: int) -> None:
    """Train from the newest checkpoint beside ``folder``, in which this rank keeps its diary.

    A sum over two ranks does not depend on the order, so results are bit-equal in any layout.
    """
    diary = begin(Path(folder), rank, Wire.SHARED, _PATIENCE_S)
    join(job.world, rank, port, store_s=_JOINS_S, timeout_s=_JOINS_S)
    diary.note("joined")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 7)).double()
    for layer in (model[0], model[2], model):
        fully_shard(layer, layout=LAYOUTS[job.layout])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpointer = checkpoint.Checkpointer(Path(folder).parent / "checkpoints", keep=KEEP)
    loaded = checkpointer.load(model, optimizer)
    first = loaded.step if loaded else 0
    assert loaded is None or loaded.extra == {"step": first}
    diary.note("loaded", step=first)
    for step in range(first + 1, job.steps + 1):
        noise = torch.Generator().manual_seed(step * job.world + rank)
        x = torch.randn(4, 48, generator=noise, dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        diary.note("saving", step=step)
        checkpointer.save(model, optimizer, {"step": step}, step=step)
        diary.note("saved", step=step)
    diary.note("done", digest=digest(model))
    dist.barrier()
    os._exit(0)


def digest(model: nn.Module) -> str:
    """Return a digest of all parameters; a collective."""
    found = hashlib.sha256()
    for value in checkpoint.full_state_dict(model, rank0_only=False).values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()[:16]
