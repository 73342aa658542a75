"""The workers of a job, as described by torchrun's environment variables."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.errors import ConfigError, FullshardError

Result = TypeVar("Result")

STORE = "FULLSHARD_STORE"
"""Environment variable with the store for workers of our launcher: a file, or ``TCP`` and the port
of a store on loopback."""

JOINED = "fullshard/joined"
"""Key that each worker sets in that store once it is in the process group; all have met then."""

LAUNCHER = "FULLSHARD_LAUNCHER"
"""Environment variable with the process id of our launcher."""

TCP = "tcp:"
LOOPBACK = "127.0.0.1"

_START_S = 600.0  # machines may be slow to start


class HostRows:
    """A table that is being copied to the host."""

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
        """Return whether the table needed no copy, as on a CPU."""
        return self._there is None

    def read(self) -> Tensor:
        """Wait for the table, but not for work issued later, and return the table on the CPU."""
        if self._there is not None:
            self._there.synchronize()
        return self._table


@dataclass(frozen=True, slots=True)
class World:
    """A worker's view of the job, with the few collectives that training needs beside FSDP."""

    rank: int
    size: int
    device: torch.device
    kept: dist.Store | None = None
    """The store that torchrun keeps when it restarts workers; None without torchrun."""

    @property
    def is_first(self) -> bool:
        """Return whether this worker prints and writes files for all workers."""
        return self.rank == 0

    def rows(self, *values: Tensor | float) -> Tensor:
        """Return all workers' exact ``values`` as an fp64 CPU tensor ``[size, len(values)]``."""
        return self.rows_later(*values).read()

    def rows_later(self, *values: Tensor | float) -> HostRows:
        """Start ``rows``; the host waits for the device only when it reads the table."""
        there = self.device.type != "cpu"
        known = [0.0 if isinstance(value, Tensor) else value for value in values]
        row = torch.tensor(known, dtype=torch.float64, pin_memory=there)
        table = torch.zeros(self.size, len(values), dtype=torch.float64, device=self.device)
        table[self.rank].copy_(row, non_blocking=there)
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                table[self.rank, i].copy_(value, non_blocking=there)
        dist.all_reduce(table)  # exact: it only adds zeros
        return HostRows(table)

    def put(self, tensor: Tensor) -> Tensor:
        """Copy the CPU tensor ``tensor`` to this worker's device without blocking the host."""
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def agree(self, do: Callable[[], Result]) -> Result:
        """Call ``do`` on all workers, and return its result.

        Raises:
            ConfigError: on all workers, if ``do`` raised an error of fullshard on some; the message
                is that of the lowest such rank.
        """
        result, refusal = None, None
        try:
            result = do()
        except FullshardError as error:
            refusal = str(error)
        refusals: list[str | None] = [None] * self.size
        dist.all_gather_object(refusals, refusal)
        for each in refusals:
            if each is not None:
                raise ConfigError(each)
        return typing.cast(Result, result)


def is_worker() -> bool:
    """Return whether torchrun or our launcher started this process as a worker of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_launched() -> None:
    """Check that the launcher of this process has set the variables that a worker needs.

    Raises:
        ConfigError: only some of the variables are set, and the others cannot be derived.
    """
    of_store = [] if STORE in os.environ else ["MASTER_ADDR", "MASTER_PORT"]
    needed = ["RANK", "WORLD_SIZE", *of_store]
    missing = [name for name in needed if name not in os.environ]
    if not missing:
        local_rank()
    elif "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        given = [name for name in needed if name in os.environ]
        raise ConfigError(
            f"the environment has {', '.join(given)}, but not {', '.join(missing)}: start workers "
            "by torchrun, which sets all of them, or unset those that an earlier job left"
        )


def local_rank() -> int:
    """Return the number of this worker on its machine, and so of its GPU.

    Launchers of one worker per machine may omit ``LOCAL_RANK``, which then counts as 0.

    Raises:
        ConfigError: ``LOCAL_RANK`` is not set, and the machine has several GPUs to choose from.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if "LOCAL_RANK" not in os.environ and found > 1:
        raise ConfigError(
            f"RANK is set, but LOCAL_RANK is not, and this machine has {found} GPUs. Start the "
            "workers by torchrun, or set both variables yourself: LOCAL_RANK numbers the workers "
            "of a machine from 0, LOCAL_WORLD_SIZE counts them"
        )
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_local_workers() -> int:
    """Return the number of workers that the launcher started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def speaks() -> bool:
    """Return whether this worker prints refusals: rank 0, or one per machine before init."""
    return os.environ.get("RANK" if dist.is_initialized() else "LOCAL_RANK", "0") == "0"


@contextmanager
def join_world() -> Iterator[World]:
    """Join the process group: NCCL on the GPU of ``LOCAL_RANK``, or gloo on CPU.

    Raises:
        ConfigError: this machine has GPUs, but fewer than local workers.
    """
    place, kept = launcher_rendezvous()
    if torch.cuda.is_available():
        check_gpus(num_local_workers())
        device = torch.device("cuda", local_rank())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **place)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", **place)
    place["store"].set(JOINED, "")
    yield World(dist.get_rank(), dist.get_world_size(), device, kept)
    # Only on success: destroying a process group in which other workers still wait can hang.
    dist.destroy_process_group()


def launcher_rendezvous() -> tuple[dict[str, Any], dist.Store | None]:
    """Return arguments of ``init_process_group``, and the store that torchrun keeps over restarts.

    The store is None with our launcher.
    """
    place = os.environ.get(STORE)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if place is not None:
        store: dist.Store
        if place.startswith(TCP):
            store = dist.TCPStore(LOOPBACK, int(place.removeprefix(TCP)), is_master=False)
        else:
            store = dist.FileStore(place, size)
        return {"store": store, "rank": rank, "world_size": size}, None
    kept, rank, size = next(dist.rendezvous("env://"))
    # A prefix hides the keys of earlier workers.
    store = dist.PrefixStore(_name_of_start(kept, rank, size), kept)
    return {"store": store, "rank": rank, "world_size": size}, kept


def _name_of_start(store: dist.Store, rank: int, size: int) -> str:
    """Return a name that all workers of this start share, and no earlier start had.

    Each worker draws a random number. The first worker publishes the list of all numbers, until
    each worker has found its own number in the list. Counts of restarts cannot serve as a name,
    because each agent of torchrun counts on its own.
    """
    own = secrets.token_hex(8)
    store.set(f"fullshard/own/{rank}", own)
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        if rank == 0:
            numbers = [store.get(f"fullshard/own/{each}").decode() for each in range(size)]
            store.set("fullshard/all", " ".join(numbers))
        told = store.get("fullshard/all").decode()
        if told.split()[rank : rank + 1] == [own]:
            name = hashlib.sha256(told.encode()).hexdigest()
            store.set(f"fullshard/found/{rank}", name)
            if rank == 0:
                found = (store.get(f"fullshard/found/{each}").decode() for each in range(size))
                if all(each == name for each in found):
                    store.set(f"fullshard/go/{name}", "")
            if store.check([f"fullshard/go/{name}"]):
                return name
        time.sleep(0.02)
    raise ConfigError(f"the {size} workers of the job did not meet in {_START_S:g} s")


def check_gpus(num_workers: int) -> None:
    """Raise ``ConfigError`` if this machine has GPUs, but fewer than ``num_workers``."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else None
    if found is not None and num_workers > found:
        raise ConfigError(
            f"{num_workers} workers on a machine with {found} GPUs: each needs one of its own, "
            "give a smaller --nproc (torchrun: --nproc-per-node)"
        )
