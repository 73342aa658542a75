"""The workers of a run, as torchrun describes them in the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.errors import ConfigError

STORE = "FULLSHARD_STORE"
"""Environment variable; the file by which workers meet that our launcher started."""


class Rows:
    """A table on its way to the host."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._there: torch.Event | None = None
        if table.device.type != "cpu":
            self._table = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            self._table.copy_(table, non_blocking=True)
            self._there = torch.Event(table.device)
            self._there.record()

    @property
    def is_here(self) -> bool:
        """Whether it was there at once, as it is on a CPU."""
        return self._there is None

    def read(self) -> Tensor:
        """The table, on the CPU; waits for it, and for nothing that was issued after it."""
        if self._there is not None:
            self._there.synchronize()
        return self._table


@dataclass(frozen=True, slots=True)
class World:
    """This worker's place among all, and the little they tell each other besides training."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this worker is the one that prints and writes."""
        return self.rank == 0

    def rows(self, *values: Tensor | float) -> Tensor:
        """Every worker's ``values``, exactly, as fp64 on CPU ``[size, len(values)]``."""
        return self.rows_later(*values).read()

    def rows_later(self, *values: Tensor | float) -> Rows:
        """The same on its way: the host waits for no device before it reads them."""
        there = self.device.type != "cpu"
        known = [0.0 if isinstance(value, Tensor) else value for value in values]
        row = torch.tensor(known, dtype=torch.float64, pin_memory=there)
        table = torch.zeros(self.size, len(values), dtype=torch.float64, device=self.device)
        table[self.rank].copy_(row, non_blocking=there)
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                table[self.rank, i].copy_(value, non_blocking=there)
        dist.all_reduce(table)  # adds nothing but zeros
        return Rows(table)

    def put(self, tensor: Tensor) -> Tensor:
        """``tensor``, which is on the CPU, on this worker's device, while the host goes on."""
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def barrier(self) -> None:
        """Waits until every worker has arrived."""
        dist.barrier()

    def agree(self, refusal: str | None) -> None:
        """Refuses on all workers alike if any of them does.

        Raises:
            ConfigError: with the first refusal.
        """
        refusals: list[str | None] = [None] * self.size
        dist.all_gather_object(refusals, refusal)
        for each in refusals:
            if each is not None:
                raise ConfigError(each)


def is_worker() -> bool:
    """Whether a launcher, torchrun or ours, started this process as one worker of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def num_local_workers() -> int:
    """How many workers the launcher started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_first_here() -> bool:
    """Whether this worker is the first of its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def speaks() -> bool:
    """Whether this worker tells what all refuse; before they met, one on each machine does."""
    return os.environ.get("RANK" if dist.is_initialized() else "LOCAL_RANK", "0") == "0"


@contextmanager
def join_world() -> Iterator[World]:
    """Joins the process group: NCCL on the GPU of ``LOCAL_RANK``, or gloo on CPU.

    Raises:
        ConfigError: if this machine has a GPU, but not one for each of its workers.
    """
    if torch.cuda.is_available():
        check_gpus(num_local_workers())
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **_meeting_place())
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", **_meeting_place())
    yield World(dist.get_rank(), dist.get_world_size(), device)
    # Only after a good end: taking a group down while other workers still wait in it can hang.
    dist.destroy_process_group()


def _meeting_place() -> dict[str, Any]:
    """Where the workers meet: at the address that torchrun gave them, or by a file of ours."""
    path = os.environ.get(STORE)
    if path is None:
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {"store": dist.FileStore(path, size), "rank": rank, "world_size": size}


def check_gpus(num_workers: int) -> None:
    """Raises ``ConfigError`` if there are GPUs, but fewer than ``num_workers``."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else None
    if found is not None and num_workers > found:
        raise ConfigError(
            f"{num_workers} workers on a machine with {found} GPUs: each needs one of its own, "
            "give a smaller --nproc (torchrun: --nproc-per-node)"
        )
