"""Leaves the process groups of a failed attempt, and makes those of the next."""

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
from fullshard.comm.heartbeat import stall_s
from fullshard.comm.own_store import own_store
from fullshard.errors import FullshardError

log = logging.getLogger("fullshard")


class Origin(NamedTuple):
    """The arguments that the default process group was made with, to make others like it."""

    store: dist.Store
    backend: str
    timeout: timedelta
    options: Any
    device: torch.device | None

    @classmethod
    def found(cls) -> Origin:
        """Return the arguments of the present default process group."""
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
    """Make a default process group of ``world`` ranks; all of them call this with one ``name``.

    Raises:
        RuntimeError: PyTorch's, if a rank did not call this within ``stall_s``. Some NCCL groups
            connect later, in the first collective.
    """
    dist.init_process_group(
        origin.backend,
        store=dist.PrefixStore(name, origin.store),
        rank=rank,
        world_size=world,
        timeout=min(origin.timeout, timedelta(seconds=stall_s())),
        pg_options=_torch.options_like(origin.options),  # a new object for each group
        device_id=origin.device,
    )
    group = dist.group.WORLD
    assert group is not None
    _torch.set_timeout(group, origin.timeout)
    own_store().set_timeout(origin.timeout)
    for variable, value in (("RANK", rank), ("WORLD_SIZE", world)):
        if variable in os.environ:  # programs read the variables of their launcher
            os.environ[variable] = str(value)
    watch.begin()


def leave(error: BaseException | None) -> None:
    """Leave all process groups, which wakes ranks that wait for this one in PyTorch's collectives.

    A frame may hold a model, and the model its groups. So the local variables of the frames in the
    traceback of ``error`` are cleared.
    """
    try:
        settle()  # ends a background save; on other ranks it runs until theirs ends, too
    except FullshardError as failure:
        log.warning("a checkpoint was not completed: %s", failure)
    _clear_frames(error)
    group = dist.group.WORLD
    old = None if group is None else weakref.ref(group)
    del group
    watching = watch.watcher()
    if watching is not None:
        watching.report_exit("has left its process groups")
    del watching
    gc.collect()  # models are reference cycles
    _torch.drop_groups()
    gc.collect()
    if old is not None and _is_held(old()):
        log.warning(
            "an object still holds the previous process group, and perhaps a model, so their "
            "memory and threads are not freed. Keep no model, mesh or process group of train "
            "outside it"
        )


def _is_held(group: dist.ProcessGroup | None) -> bool:
    """Return whether a Python object other than a frame holds ``group``."""
    return group is not None and any(
        not isinstance(one, FrameType) for one in gc.get_referrers(group)
    )


def _clear_frames(error: BaseException | None) -> None:
    """Clear the local variables in the tracebacks of ``error`` and of the errors that led to it."""
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
