"""A process of the pool: it waits for a job, runs it, and replies.

A worker knows its rank. It keeps its process group from one job to the next, because most tests in
a row use the same world size. The pool numbers the groups: a job with another number gets a new
group, so ranks that missed some jobs never use an old one.
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

    call: bytes  # pickled (function, args, kwargs); unpickled where an error can be reported
    world: int
    group: int | None  # number of the process group to join; None: no process group


@dataclass(frozen=True)
class Reply:
    """The end of a job on one rank: a pickled result, or the traceback of an exception."""

    result: bytes = b""
    error: str = ""
    failed_at_s: float = 0.0  # on the clock that all processes of the machine share
    same_group: bool = True  # the job left only its default group


@dataclass(frozen=True)
class Station:
    """The settings that a worker gets at its start."""

    rank: int
    store_port: int
    stack_path: str
    warning_filters: Sequence[str]


class GroupKeeper:
    """The default process group of this worker, kept until a job names another one."""

    def __init__(self, station: Station) -> None:
        self._rank = station.rank
        self._store = dist.TCPStore(HOST, station.store_port, is_master=False)
        self._number: int | None = None

    def enter(self, job: Job) -> None:
        """Join the group that the job names; the job's ranks create a new one together."""
        if job.group is not None and job.group == self._number:
            return
        self.leave()  # also without a number: the job before may have made its own group
        if job.group is None:
            return
        store = dist.PrefixStore(f"group{job.group}", self._store)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=job.world)
        self._number = job.group

    def leave(self) -> None:
        """Leave the group; ranks waiting for this rank see a closed connection, not a hang."""
        self._number = None
        if dist.is_initialized():
            _mesh.forget_meshes()  # or later jobs would get the meshes of this job
            gc.collect()  # models are cycles that hold meshes, and so the threads of groups
            dist.destroy_process_group()

    def is_unchanged(self) -> bool:
        """Return True if the job made no other groups and left its default group alone."""
        if self._number is None:
            return not dist.is_initialized()
        return dist.is_initialized() and dist.get_pg_count() == 1


def main(station: Station, pipe: Connection) -> None:
    """Run jobs until the pool closes the pipe."""
    stacks = open(station.stack_path, "w")  # noqa: SIM115 - faulthandler writes to it until the end
    faulthandler.enable(file=stacks)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool handles Ctrl-C
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
    """Call the job's function; report any exception in the reply."""
    try:
        groups.enter(job)
        function, args, kwargs = _loaded(job.call)
        for step in watch.steps():
            step.is_abandoned = True  # no job continues with an earlier job's models
        with _private_state(warning_filters), strict():
            result = function(*args, **kwargs)
        return Reply(result=pickle.dumps(result), same_group=groups.is_unchanged())
    except BaseException as raised:  # a SystemExit must not end the worker
        error, failed_at_s = _told(raised), time.monotonic()
    # Only here are the frames of the failed call gone, with their references to the group.
    groups.leave()
    return Reply(error=error, failed_at_s=failed_at_s, same_group=False)


def _told(raised: BaseException) -> str:
    """Return the traceback, and after a failed assertion the values of local names."""
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
    """Unpickle a job's call, and freeze modules that were imported since the last job.

    Objects of modules live as long as the process. The garbage collections at the end of jobs skip
    frozen objects, which otherwise take most of their time. Jobs import modules, too.
    """
    global _num_frozen
    loaded = pickle.loads(call)
    if len(sys.modules) > _num_frozen:
        gc.collect()  # or objects of earlier jobs would stay as well
        gc.freeze()
        _num_frozen = len(sys.modules)
    return loaded


_num_frozen = 0
"""Number of imported modules when ``_loaded`` last froze them."""


@contextmanager
def _private_state(warning_filters: Sequence[str]) -> Iterator[None]:
    """Undo changes that a job makes for the whole process: dtype, seed, warnings and threads."""
    dtype = torch.get_default_dtype()
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            apply_warning_filters(warning_filters, ())
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(1)


def _clean_environment() -> None:
    """Remove variables of launchers, which torch would read; keep gloo on the loopback device."""
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def die_with_parent() -> None:
    """End this process with the pool's; a worker in a hanging job would otherwise run forever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


WATCHER = die_with_parent.__name__  # its stack is left out of reports
