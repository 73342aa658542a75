"""What a process of the pool does: wait for a job, run it, answer.

A worker knows its rank and keeps its process group from one job to the next, because most tests in
a row use the same world. The group has a number, chosen by the pool: a job that comes with another
number gets a fresh group, so ranks that sat out some jobs never talk through a stale one.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import reprlib
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from _pytest.config import apply_warning_filters

from fullshard import watch
from fullshard._torch import mesh as _mesh
from tests.ranks.strict import strict

HOST = "127.0.0.1"
STACK_SIGNAL = signal.SIGUSR1
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Job:
    """One function call on one rank."""

    call: bytes  # pickled (function, args, kwargs); opened where an error can be reported
    world: int
    group: int | None  # number of the process group to be in; None: no process group at all


@dataclass(frozen=True)
class Reply:
    """How a job ended on one rank: a pickled result, or the traceback that prevented it."""

    result: bytes = b""
    error: str = ""
    failed_at_s: float = 0.0  # on the clock that all processes of the machine share
    same_group: bool = True  # the job left exactly the default group that it was given


@dataclass(frozen=True)
class Station:
    """What a worker is told once, at its start."""

    rank: int
    store_port: int
    stack_path: str
    warning_filters: Sequence[str]


class GroupKeeper:
    """Holds the default process group between jobs and replaces it when a job asks for another."""

    def __init__(self, station: Station) -> None:
        self._rank = station.rank
        self._store = dist.TCPStore(HOST, station.store_port, is_master=False)
        self._number: int | None = None

    def enter(self, job: Job) -> None:
        """Be in the group that the job names; if it is new, the job's ranks make it together."""
        if job.group is not None and job.group == self._number:
            return
        self.leave()  # without a number too: the job before may have made a group of its own
        if job.group is None:
            return
        store = dist.PrefixStore(f"group{job.group}", self._store)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=job.world)
        self._number = job.group

    def leave(self) -> None:
        """Be in no group; peers waiting for this rank see a closed connection, not a hang."""
        self._number = None
        if dist.is_initialized():
            _mesh.forget_meshes()  # or later jobs would be handed the meshes of this one
            gc.collect()  # models are cycles; they hold meshes, and these the threads of groups
            dist.destroy_process_group()

    def is_unchanged(self) -> bool:
        """Whether the job made no further groups and left the default one alone."""
        if self._number is None:
            return not dist.is_initialized()
        return dist.is_initialized() and dist.get_pg_count() == 1


def main(station: Station, pipe: Connection) -> None:
    """Run jobs until the pool closes the pipe."""
    stacks = open(station.stack_path, "w")  # noqa: SIM115 - faulthandler writes to it until the end
    faulthandler.enable(file=stacks)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's to answer
    threading.Thread(target=die_with_parent, daemon=True).start()
    _clean_environment()
    torch.set_num_threads(1)
    groups = GroupKeeper(station)
    pipe.send_bytes(b"ready")
    while True:
        try:
            job: Job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(perform(job, groups, station.warning_filters)))


def perform(job: Job, groups: GroupKeeper, warning_filters: Sequence[str]) -> Reply:
    """Call the job's function; whatever goes wrong becomes part of the reply."""
    try:
        groups.enter(job)
        function, args, kwargs = _loaded(job.call)
        for step in watch.steps():
            step.is_abandoned = True  # no job goes on with the models of another
        with _private_state(warning_filters), strict():
            result = function(*args, **kwargs)
        return Reply(result=pickle.dumps(result), same_group=groups.is_unchanged())
    except BaseException as raised:  # a SystemExit must not end the worker
        error, failed_at_s = _told(raised), time.monotonic()
    # Only here is the failed call's frame gone, and with it what it held of the group.
    groups.leave()
    return Reply(error=error, failed_at_s=failed_at_s, same_group=False)


def _told(raised: BaseException) -> str:
    """Return the traceback, and for a failed assertion the values of names where it stands."""
    told = traceback.format_exc()
    if isinstance(raised, AssertionError):
        frame, _ = list(traceback.walk_tb(raised.__traceback__))[-1]
        told += "".join(f"    {name} = {_VALUES.repr(v)}\n" for name, v in frame.f_locals.items())
    return told


_VALUES = reprlib.Repr()
_VALUES.maxother = _VALUES.maxstring = 200
for _kind in ("Tensor", "Parameter", "DTensor"):  # their memory may be freed
    setattr(_VALUES, f"repr_{_kind}", lambda x, _: f"{type(x).__name__} of shape {tuple(x.shape)}")


def _loaded(call: bytes) -> Any:
    """What is to be called, its modules imported.

    What modules are made of lives as long as the process. Frozen, it costs the collections that
    end the jobs no time, which is most of what they would take. Jobs import modules, too.
    """
    global _num_frozen
    loaded = pickle.loads(call)
    if len(sys.modules) > _num_frozen:
        gc.collect()  # or the jobs before would stay as well
        gc.freeze()
        _num_frozen = len(sys.modules)
    return loaded


_num_frozen = 0
"""How many modules were imported when ``_loaded`` last froze them."""


@contextmanager
def _private_state(warning_filters: Sequence[str]) -> Iterator[None]:
    """What a job sets for the whole process does not reach the next job."""
    dtype = torch.get_default_dtype()
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            apply_warning_filters(warning_filters, ())
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(1)


def _clean_environment() -> None:
    """No launcher's variables, which torch would read; gloo on the loopback device only."""
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def die_with_parent() -> None:
    """A worker that hangs while its test session is killed would otherwise hang forever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


WATCHER = die_with_parent.__name__  # its stack tells a reader nothing
