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
from fullshard.errors import ConfigError

_BROADCAST_NBYTES = 256 << 20  # about; what is joined takes that much memory

Wire = Callable[[dist.ProcessGroup, str], Collectives]
"""Makes collectives for a group and a type of device."""

# One object per group and kind: its tags must be counted once, whoever uses it.
_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Wire, Collectives]]
_of_group = weakref.WeakKeyDictionary()
_wire: Wire = C10d  # not of a context: ranks that are threads share what the process chose
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
    """A group of ``ranks``, by the backend and with the time-out and options of ``like``.

    No other rank need take part: other pipeline stages may not want one.
    """
    with _torch.apart_from_the_default_group():
        group: dist.ProcessGroup = dist.new_group(
            ranks,
            timeout=_torch.timeout_of(like, device_type),
            backend=dist.get_backend_config(like),
            pg_options=_torch.group_options(like, device_type),
            use_local_synchronization=True,
        )
    return group


def _collectives(group: dist.ProcessGroup, device_type: str) -> Collectives:
    kinds = _of_group.setdefault(group, {})
    collectives = kinds.get(_wire)
    if collectives is None:
        alone = group.size() == 1
        collectives = kinds[_wire] = Alone() if alone else _wire(group, device_type)
    wrapper = _wrapper.get()
    return collectives if wrapper is None else wrapper(collectives)


def choose_wire(wire: Wire) -> Wire:
    """Make what is sharded from now on use ``wire``, ``C10d`` or ``Public``; returns the last."""
    global _wire
    last, _wire = _wire, wire
    return last


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

    They may be on a device that the group does not serve; a stand-in for a group serves all.
    """
    op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    is_real = isinstance(group, dist.ProcessGroup)
    served = _torch.device_types(group) if is_real else [values.device.type]
    if values.device.type in served:
        dist.all_reduce(values, op, group=group)
        return
    kind = next(iter(served))
    there = values.to(torch.device(kind, torch.get_device_module(kind).current_device()))
    dist.all_reduce(there, op, group=group)  # of offloaded gradients, say
    values.copy_(there)


def broadcast_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Make ``tensors`` what they are on the first rank of ``group``, many in one call."""
    alike: dict[tuple[torch.dtype, torch.device, int], list[Tensor]] = {}
    sent = 0
    for tensor in tensors:
        if tensor.numel():
            key = (tensor.dtype, tensor.device, sent // _BROADCAST_NBYTES)
            alike.setdefault(key, []).append(tensor)
            sent += tensor.nbytes
    for those in alike.values():
        joined = torch.cat([tensor.reshape(-1) for tensor in those])
        dist.broadcast(joined.view(torch.uint8), group=group, group_src=0)
        parts = joined.split([tensor.numel() for tensor in those])
        for tensor, part in zip(those, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


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


def all_same(value: bytes, mesh: DeviceMesh) -> bool:
    """Whether ``value``, a digest of something larger, is the same on all ranks of ``mesh``."""
    same: bytes | None = value
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        found: list[bytes | None] = [None] * group.size()
        dist.all_gather_object(found, same, group=group)
        same = value if all(one == value for one in found) else None
    return same is not None


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


def default_mesh(device_type: str | None = None) -> DeviceMesh:
    """The 1-D mesh of all processes, on the accelerator if the default group can use it.

    Without a process group one is made: from the launcher's environment variables, or, where no
    launcher started us, a world of one.
    """
    if not dist.is_initialized():
        _init_process_group()
    return init_device_mesh(device_type or _device_type(), (dist.get_world_size(),))


def mesh_of_group(group: dist.ProcessGroup, device_type: str | None = None) -> DeviceMesh:
    """The 1-D mesh of the ranks of ``group``."""
    return DeviceMesh.from_group(group, device_type or _device_type())


def mesh_of_dim(mesh: DeviceMesh, dim: int) -> DeviceMesh:
    """One dim of ``mesh``, as a mesh with the ranks along it; dims may be without names."""
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names:
        return mesh[mesh.mesh_dim_names[dim]]
    return mesh_of_group(mesh.get_group(dim), mesh.device_type)


def mesh_of_groups(
    shards: dist.ProcessGroup, replicas: dist.ProcessGroup, device_type: str | None = None
) -> DeviceMesh:
    """The 2-D mesh with the ranks of ``replicas`` along dim 0, those of ``shards`` along dim 1.

    Ranks tell each other which groups they are in, so all of them must call this.

    Raises:
        ConfigError: these are not the rows and columns of a grid.
    """
    rows: list[list[int]] = [[] for _ in range(replicas.size())]
    dist.all_gather_object(rows, dist.get_process_group_ranks(shards), group=replicas)
    ranks = [rank for row in rows for rank in row]
    if len(set(ranks)) < len(ranks) or len({len(row) for row in rows}) > 1:
        raise ConfigError(
            f"process_group: the ranks {dist.get_process_group_ranks(replicas)}, which shall hold "
            f"the same, share copies with the ranks {rows}; expected as many for each, and no rank "
            "twice"
        )
    return DeviceMesh.from_group(
        [replicas, shards],
        device_type or _device_type(),
        mesh=torch.tensor(rows, dtype=torch.int),
        mesh_dim_names=("replicate", "shard"),
    )


def mesh_of_nodes(device_type: str | None = None) -> DeviceMesh:
    """A mesh of all processes: copies along dim 0, those of one machine share a copy along dim 1.

    Which are on one machine the launcher says; without one, all are.
    """
    world = dist.get_world_size()
    size = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    shape = (world // size, size) if world % size == 0 else (1, world)
    return init_device_mesh(
        device_type or _device_type(), shape, mesh_dim_names=("replicate", "shard")
    )


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
