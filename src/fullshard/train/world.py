"""The workers of a run, as torchrun describes them in the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["World", "is_worker", "join_world"]


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

    def sum(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over all workers, in place."""
        dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        """Waits until every worker has arrived."""
        dist.barrier()

    def tell(self, message: str | None) -> str | None:
        """What the first worker says, on every worker."""
        box = [message]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def is_worker() -> bool:
    """Whether a launcher, torchrun or ours, started this process as one worker of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def join_world() -> Iterator[World]:
    """Joins the process group: NCCL on the GPU of ``LOCAL_RANK``, or gloo on CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    yield World(dist.get_rank(), dist.get_world_size(), device)
    # Only after a good end: taking a group down while other workers still wait in it can hang.
    dist.destroy_process_group()
