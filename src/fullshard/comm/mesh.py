"""Meshes, and the collectives that belong to their process groups."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import _torch
from fullshard.comm.c10d import C10d
from fullshard.comm.protocol import Alone, Collectives, Together

__all__ = [
    "all_reduce",
    "broadcast_from_first",
    "broadcast_object_from_first",
    "broadcast_pieces",
    "collectives_of",
    "collectives_of_part",
    "collectives_of_twin",
    "default_mesh",
    "device_types_of",
    "gather_uneven",
    "wrapped",
]

# One object per group: its tags must be counted once, whoever uses it.
_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, Collectives]
_of_group = weakref.WeakKeyDictionary()
_parts_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]]
_parts_of_group = weakref.WeakKeyDictionary()

_wrapper: ContextVar[Callable[[Collectives], Collectives] | None]
_wrapper = ContextVar("fullshard_collectives_wrapper", default=None)


def collectives_of(mesh: DeviceMesh, dim: int = 0) -> Collectives:
    """The collectives along one dim of ``mesh``."""
    return _collectives(mesh.get_group(dim), mesh.device_type)


def collectives_of_part(mesh: DeviceMesh, dim: int, size: int) -> Collectives:
    """Collectives among ``size`` neighbours along one dim of ``mesh``; ``size`` divides that dim.

    The first call for a mesh makes a process group, for which it meets the ranks of the part.
    """
    whole = mesh.get_group(dim)
    parts = _parts_of_group.setdefault(whole, {})
    if size not in parts:
        first = whole.rank() // size * size
        ranks = dist.get_process_group_ranks(whole)[first : first + size]
        parts[size] = _new_group(ranks, like=whole, device_type=mesh.device_type)
    return _collectives(parts[size], mesh.device_type)


def collectives_of_twin(collectives: Collectives, device_type: str) -> Collectives:
    """The same ranks by a process group of its own, so that both can be busy at a time.

    Each call makes a group, for which it meets the other ranks; of one rank it is the same.
    """
    group = collectives.group
    if group is None:
        return collectives
    ranks = dist.get_process_group_ranks(group)
    return _collectives(_new_group(ranks, like=group, device_type=device_type), device_type)


def _new_group(ranks: list[int], *, like: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """A group of ``ranks``, by the backend and with the time-out of ``like``."""
    group: dist.ProcessGroup = dist.new_group(
        ranks,
        timeout=_torch.timeout_of(like, device_type),
        backend=dist.get_backend_config(like),
        use_local_synchronization=True,
    )
    return group


def _collectives(group: dist.ProcessGroup, device_type: str) -> Collectives:
    collectives = _of_group.get(group)
    if collectives is None:
        alone = group.size() == 1
        collectives = _of_group[group] = Alone() if alone else C10d(group, device_type)
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
    """Types of devices on which the groups of ``mesh`` communicate."""
    types = (_torch.device_types(mesh.get_group(dim)) for dim in range(mesh.ndim))
    return sorted(set.intersection(*map(set, types)))


def all_reduce(values: Tensor, group: dist.ProcessGroup, *, is_max: bool) -> None:
    """Make a few ``values`` the largest, or the sums, over the ranks of ``group``, in place.

    They may be on a device that the group does not serve.
    """
    op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    served = _torch.device_types(group)
    if values.device.type in served:
        dist.all_reduce(values, op, group=group)
        return
    kind = next(iter(served))
    there = values.to(torch.device(kind, torch.get_device_module(kind).current_device()))
    dist.all_reduce(there, op, group=group)  # of offloaded gradients, say
    values.copy_(there)


def broadcast_from_first(values: Tensor, mesh: DeviceMesh) -> None:
    """Replace contiguous ``values`` by what they are on the first rank of ``mesh``."""
    for dim in range(mesh.ndim):
        collectives_of(mesh, dim).broadcast(values, 0).wait()


def broadcast_object_from_first(value: Any, mesh: DeviceMesh) -> Any:
    """What ``value``, which is pickled, is on the first rank of ``mesh``."""
    for dim in range(mesh.ndim):
        box = [value]
        dist.broadcast_object_list(box, group=mesh.get_group(dim), group_src=0)
        (value,) = box
    return value


def gather_uneven(piece: Tensor, lengths: Sequence[int], wire: Collectives) -> Tensor:
    """The pieces of all ranks of ``wire``, end to end.

    ``piece`` is 1-D, ``lengths[r]`` the elements of rank r's.

    One all-gather of padded pieces, or, where that would move twice what is needed, such as for a
    tensor that one rank of many holds, one broadcast for each rank that holds something.
    """
    total, longest = sum(lengths), max(lengths)
    if piece.dtype is torch.bool:  # which gloo does not carry
        return gather_uneven(piece.view(torch.uint8), lengths, wire).view(torch.bool)
    if longest * len(lengths) > 2 * total:
        return broadcast_pieces(piece, lengths, wire)
    source = piece.new_zeros(longest)
    source[: len(piece)] = piece
    gathered = piece.new_empty(len(lengths) * longest)
    wire.all_gather([gathered], [source]).wait()
    padded = gathered.view(len(lengths), longest).unbind()
    return torch.cat([row[:length] for row, length in zip(padded, lengths, strict=True)])


def broadcast_pieces(piece: Tensor, lengths: Sequence[int], wire: Collectives) -> Tensor:
    """The same by one broadcast for each rank that holds something, in the result's memory alone.

    All are started at once; together they move what an all-gather does.
    """
    whole = piece.new_empty(sum(lengths))
    parts = whole.split(list(lengths))
    parts[wire.rank].copy_(piece)
    started = [wire.broadcast(part, rank) for rank, part in enumerate(parts) if len(part)]
    Together(started).wait()
    return whole


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
