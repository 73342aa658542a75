"""Leaving the process groups of a job that failed, and making those of the next."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import traceback
import weakref
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullshard import _torch, watch
from fullshard.checkpoint.pending import settle
from fullshard.comm.own_store import own_store
from fullshard.comm.pulse import stall_s
from fullshard.errors import FullshardError

log = logging.getLogger("fullshard")


class Origin(NamedTuple):
    """How the default process group was made, for others like it."""

    store: dist.Store
    backend: str
    timeout: timedelta
    options: Any
    device: torch.device | None

    @classmethod
    def found(cls) -> Origin:
        """Return how the present one was made."""
        group = dist.group.WORLD
        assert group is not None
        device_type = next(iter(_torch.device_types(group)))
        return cls(
            _torch.default_store(),
            dist.get_backend_config(group),
            _torch.timeout_of(group, device_type),
            _torch.group_options(group),
            group.bound_device_id,
        )


def join(origin: Origin, name: str, rank: int, world: int) -> None:
    """Make the default process group of ``world`` ranks that all call this with the same ``name``.

    Raises:
        RuntimeError: a rank did not come in ``stall_s``; PyTorch's. Some NCCL groups connect later,
            in the first collective.
    """
    dist.init_process_group(
        origin.backend,
        store=dist.PrefixStore(name, origin.store),
        rank=rank,
        world_size=world,
        timeout=min(origin.timeout, timedelta(seconds=stall_s())),
        pg_options=_torch.options_like(origin.options),  # again at each call
        device_id=origin.device,
    )
    group = dist.group.WORLD
    assert group is not None
    _torch.set_timeout(group, origin.timeout)
    own_store().set_timeout(origin.timeout)
    for variable, value in (("RANK", rank), ("WORLD_SIZE", world)):
        if variable in os.environ:  # programs read what the launcher has set
            os.environ[variable] = str(value)
    watch.begin()


def leave(error: BaseException | None) -> None:
    """Leave all process groups, and so wake ranks that wait for us in PyTorch's collectives.

    Models hold groups, and frames hold models: the local variables of those that ``error`` came
    through are cleared.
    """
    try:
        settle()  # of a save beside the training; other ranks' go on until theirs is over, too
    except FullshardError as failure:
        log.warning("a checkpoint was not finished: %s", failure)
    _clear_frames(error)
    group = dist.group.WORLD
    old = None if group is None else weakref.ref(group)
    del group
    watching = watch.watcher()
    if watching is not None:
        watching.report_exit("has left its process groups")
    del watching
    gc.collect()  # models are cycles
    _torch.drop_groups()
    gc.collect()
    if old is not None and _is_held(old()):
        log.warning(
            "something still holds the process group of before, and maybe a model: its memory and "
            "threads stay. What train makes must end with it: keep nothing outside of it"
        )


def _is_held(group: dist.ProcessGroup | None) -> bool:
    """Return whether any object of Python's, but for frames, holds ``group``."""
    return group is not None and any(
        not isinstance(one, FrameType) for one in gc.get_referrers(group)
    )


def _clear_frames(error: BaseException | None) -> None:
    """Clear the local variables of the frames of ``error`` and of those that led to it."""
    seen: set[int] = set()
    errors = [error]
    while errors:
        one = errors.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        with contextlib.suppress(RuntimeError):
            traceback.clear_frames(one.__traceback__)
        errors += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            errors += one.exceptions
