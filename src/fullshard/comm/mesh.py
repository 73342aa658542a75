"""Meshes, and the collectives that belong to their process groups."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import _torch
from fullshard.comm.c10d import C10d
from fullshard.comm.protocol import Collectives

__all__ = ["all_reduce", "collectives_of", "default_mesh", "device_types_of", "wrapped"]

# One object per group: its tags must be counted once, whoever uses it.
_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, C10d] = weakref.WeakKeyDictionary()

_wrapper: ContextVar[Callable[[Collectives], Collectives] | None]
_wrapper = ContextVar("fullshard_collectives_wrapper", default=None)


def collectives_of(mesh: DeviceMesh) -> Collectives:
    """The collectives of a 1-D mesh."""
    group = mesh.get_group()
    collectives = _of_group.get(group)
    if collectives is None:
        collectives = _of_group[group] = C10d(group, mesh.device_type)
    wrapper = _wrapper.get()
    return collectives if wrapper is None else wrapper(collectives)


@contextmanager
def wrapped(wrapper: Callable[[Collectives], Collectives]) -> Iterator[None]:
    """Units sharded in the block use ``wrapper(collectives)``: how recordings are slipped in."""
    token = _wrapper.set(wrapper)
    try:
        yield
    finally:
        _wrapper.reset(token)


def device_types_of(mesh: DeviceMesh) -> list[str]:
    """Types of devices on which the group of a 1-D mesh communicates."""
    return list(_torch.device_types(mesh.get_group()))


def all_reduce(values: Tensor, group: dist.ProcessGroup, *, is_max: bool) -> None:
    """Make a few ``values`` the largest, or the sums, over the ranks of ``group``, in place."""
    dist.all_reduce(values, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)


def default_mesh() -> DeviceMesh:
    """The 1-D mesh of all processes, on the accelerator if the default group can use it.

    Without a process group one is made: from the launcher's environment variables, or, where no
    launcher started us, a world of one.
    """
    if not dist.is_initialized():
        _init_process_group()
    return init_device_mesh(_device_type(), (dist.get_world_size(),))


def _init_process_group() -> None:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group()
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)


def _device_type() -> str:
    """The accelerator's type if there is one that the default group has collectives for."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return "cpu"
    group = dist.group.WORLD
    served = group is not None and accelerator.type in _torch.device_types(group)
    return accelerator.type if served else "cpu"
