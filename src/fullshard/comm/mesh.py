"""Meshes and the collectives of their process groups."""

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
from fullshard.comm.c10d import C10d, default_transport, ways_of
from fullshard.comm.ledger import ledger_of
from fullshard.comm.protocol import Alone, Collectives, Pending, Splits, Together
from fullshard.errors import ConfigError

_BROADCAST_NBYTES = 256 << 20  # approximate; the concatenated tensors take that much memory

Wire = Callable[[dist.ProcessGroup, str], Collectives]
"""A function that makes the collectives for a process group and a device type."""

# One object per group and wire, whoever uses the group; ``c10d._ways`` counts the tags of a group.
_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Wire, Collectives]]
_of_group = weakref.WeakKeyDictionary()
_wire: Wire = C10d  # no ContextVar: ranks that are threads share the choice of their process
_parts_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]]
_parts_of_group = weakref.WeakKeyDictionary()

_flat_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], DeviceMesh]]
_flat_of_group = weakref.WeakKeyDictionary()

_wrapper: ContextVar[Callable[[Collectives], Collectives] | None]
_wrapper = ContextVar("fullshard_collectives_wrapper", default=None)


def collectives_of(mesh: DeviceMesh, dim: int = 0) -> Collectives:
    """Return the collectives along one dim of ``mesh``."""
    return collectives_of_group(mesh.get_group(dim), mesh.device_type)


def collectives_of_part(mesh: DeviceMesh, dim: int, size: int) -> Collectives:
    """Return collectives among ``size`` neighbors along one mesh dim, which ``size`` must divide.

    The first call for a mesh makes a process group: a collective over these neighbors.
    """
    whole = mesh.get_group(dim)
    parts = _parts_of_group.setdefault(whole, {})
    if size not in parts:
        first = whole.rank() // size * size
        ranks = dist.get_process_group_ranks(whole)[first : first + size]
        parts[size] = _new_group(ranks, like=whole, device_type=mesh.device_type)
    return collectives_of_group(parts[size], mesh.device_type)


def collectives_of_twin(collectives: Collectives, device_type: str) -> Collectives:
    """Return collectives over a new process group of the same ranks, so both can run at once.

    Each call is a collective that makes a group; collectives of one rank are returned as they are.
    """
    group = collectives.group
    if group is None:
        return collectives
    ranks = dist.get_process_group_ranks(group)
    return collectives.over(_new_group(ranks, like=group, device_type=device_type))


def _new_group(ranks: list[int], *, like: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """Make a group of ``ranks`` with the backend, time-out and options of ``like``.

    Only ``ranks`` take part in the call: other pipeline stages may not want such a group.
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


def collectives_of_group(group: dist.ProcessGroup, device_type: str) -> Collectives:
    """Return the collectives of ``group`` on a device type."""
    kinds = _of_group.setdefault(group, {})
    collectives = kinds.get(_wire)
    if collectives is None:
        alone = group.size() == 1
        collectives = kinds[_wire] = Alone() if alone else _wire(group, device_type)
    wrapper = _wrapper.get()
    return collectives if wrapper is None else wrapper(collectives)


def choose_wire(wire: Wire) -> Wire:
    """Use ``wire`` (``C10d`` or ``Public``) for later sharding; return the wire used before."""
    global _wire
    last, _wire = _wire, wire
    return last


@contextmanager
def wrapped(wrapper: Callable[[Collectives], Collectives]) -> Iterator[None]:
    """Make units sharded in the block use ``wrapper(collectives)``."""
    token = _wrapper.set(wrapper)
    try:
        yield
    finally:
        _wrapper.reset(token)


def device_types_of(mesh: DeviceMesh) -> list[str]:
    """Return the device types that all groups of ``mesh`` can communicate on."""
    types = (_torch.device_types(mesh.get_group(dim)) for dim in range(mesh.ndim))
    return sorted(set.intersection(*map(set, types)))


def served_by(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return ``device`` if ``group`` communicates on it, else a device on which it does."""
    served = _torch.device_types(group)
    if device.type in served:
        return device
    kind = next(iter(served))
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def all_reduce(values: Tensor, group: dist.ProcessGroup, *, is_max: bool) -> None:
    """Replace a few ``values`` by their maximum or sum over the ranks of ``group``.

    ``values`` may be on a device that the group does not serve; a stand-in group serves every one.
    """
    op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    is_real = isinstance(group, dist.ProcessGroup)
    there = values.to(served_by(group, values.device)) if is_real else values
    dist.all_reduce(there, op, group=group)
    if there is not values:  # for example offloaded gradients
        values.copy_(there)


def all_gather_bytes(own: Tensor) -> Tensor:
    """Return the bytes of all ranks of the default group, one row each, on the CPU.

    ``own`` is flat, on the CPU, and has the same size on all ranks.
    """
    group, device = _default_group()
    gathered = torch.empty(group.size(), len(own), dtype=torch.uint8, device=device)
    dist.all_gather([*gathered], own.to(device), group=group)
    return gathered.cpu()


def all_to_all(
    sent: Tensor,
    lengths: Sequence[int],
    sizes: Sequence[int],
    group: dist.ProcessGroup,
) -> Tensor:
    """Send bytes to each rank of ``group``; return what each sent to this one, in rank order.

    Args:
        sent: flat bytes: what goes to the first rank, then to the second, and so on. They may be on
            a device that the group does not serve, as those of offloaded parameters.
        lengths: how many of them go to each rank.
        sizes: how many bytes each rank sends to this one.
        group: the ranks.

    Raises:
        PeerError: another rank failed, so the exchange cannot end.
    """
    there = served_by(group, sent.device)
    given = torch.empty(sum(sizes), dtype=torch.uint8, device=there)

    def start() -> Pending:
        way = ways_of(group, default_transport(group, there.type), device_type=there.type)
        return way.exchanges.all_to_all(group, given, sent.to(there), "", Splits(lengths, sizes))

    # 0 bytes: ranks send differently many, and their ledgers must be alike.
    ledger_of(group).issue("exchange", "", 0, start).wait()
    return given.to(sent.device)


def all_to_all_bytes(
    sent: Tensor, lengths: Sequence[int], into: Tensor, sizes: Sequence[int]
) -> list[Tensor]:
    """Send bytes to each rank of the default group; return what each sent to this one.

    Args:
        sent: flat bytes on the CPU: what goes to the first rank, then to the second, and so on.
        lengths: how many of them go to each rank.
        into: overwritten with what comes, in the same order, on the CPU; may be ``sent`` if there
            is one rank.
        sizes: how many bytes each rank sends to this one.

    Returns:
        Views of ``into``, one for each rank.
    """
    if len(lengths) > 1:
        group, device = _default_group()
        given = into.to(device)
        dist.all_to_all_single(given, sent.to(device), [*sizes], [*lengths], group=group)
        if given is not into:
            into.copy_(given)
    return list(into.split([*sizes]))


def _default_group() -> tuple[dist.ProcessGroup, torch.device]:
    """Return the default group and a device whose tensors it sends, the CPU if it can."""
    group = dist.group.WORLD
    assert group is not None
    return group, served_by(group, torch.device("cpu"))


def broadcast_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite ``tensors`` with those of the first rank of ``group``, many in one broadcast."""
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
    """Overwrite contiguous ``values`` with the values on the first rank of ``mesh``."""
    for dim in range(mesh.ndim):
        collectives_of(mesh, dim).broadcast(values, 0).wait()


def broadcast_object_from_first(value: Any, mesh: DeviceMesh) -> Any:
    """Return the ``value`` of the first rank of ``mesh``; it is sent pickled."""
    for dim in range(mesh.ndim):
        box = [value]
        dist.broadcast_object_list(box, group=mesh.get_group(dim), group_src=0)
        (value,) = box
    return value


def gather_objects(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return what each rank of ``group`` passed as ``own``, by rank; any small pickled values."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, own, group=group)
    return found


def gather_over(own: Any, mesh: DeviceMesh) -> list[Any]:
    """Return what each rank of ``mesh`` passed as ``own``; any small pickled values."""
    found = [own]
    for dim in range(mesh.ndim):
        found = [one for those in gather_objects(found, mesh.get_group(dim)) for one in those]
    return found


def all_same(value: bytes, mesh: DeviceMesh) -> bool:
    """Return whether ``value``, a digest of larger data, is equal on all ranks of ``mesh``."""
    same: bytes | None = value
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        found: list[bytes | None] = [None] * group.size()
        dist.all_gather_object(found, same, group=group)
        same = value if all(one == value for one in found) else None
    return same is not None


def gather_uneven(piece: Tensor, lengths: Sequence[int], wire: Collectives) -> Tensor:
    """Return the pieces of all ranks of ``wire``, concatenated in rank order.

    ``piece`` is 1-D; ``lengths[r]`` is the number of elements of rank r's piece.

    This is one all-gather of padded pieces. If padding would more than double the traffic, as for
    a tensor that one of many ranks holds, it is one broadcast for each rank that holds elements.
    """
    total, longest = sum(lengths), max(lengths)
    if piece.dtype is torch.bool:  # gloo does not carry bool
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
    """Do the same as ``gather_uneven`` by one broadcast for each rank that holds elements.

    Only the result is allocated. All broadcasts start at once; together they move what an
    all-gather moves.
    """
    whole = piece.new_empty(sum(lengths))
    parts = whole.split(list(lengths))
    parts[wire.rank].copy_(piece)
    started = [wire.broadcast(part, rank) for rank, part in enumerate(parts) if len(part)]
    Together(started).wait()
    return whole


def default_mesh(device_type: str | None = None) -> DeviceMesh:
    """Return the 1-D mesh of all processes, on the accelerator if the default group supports it.

    If there is no default process group, make one: from the launcher's environment variables, or
    with a world size of 1 if no launcher started this process.
    """
    if not dist.is_initialized():
        _init_process_group()
    return init_device_mesh(device_type or _device_type(), (dist.get_world_size(),))


def mesh_of_group(group: dist.ProcessGroup, device_type: str | None = None) -> DeviceMesh:
    """Return the 1-D mesh of the ranks of ``group``."""
    return DeviceMesh.from_group(group, device_type or _device_type())


def mesh_of_dim(mesh: DeviceMesh, dim: int) -> DeviceMesh:
    """Return one dim of ``mesh`` as a 1-D mesh of the ranks along it; dims may be unnamed."""
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names:
        return mesh[mesh.mesh_dim_names[dim]]
    return mesh_of_group(mesh.get_group(dim), mesh.device_type)


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Return all ranks of ``mesh``, in ascending order, as a 1-D mesh; the same at every call.

    The first call for a mesh with several dims of more than one rank makes a process group, a
    collective of its ranks, unless the mesh has all ranks there are.
    """
    dims = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    first = mesh.get_group(dims[0] if dims else 0)
    ranks = sorted(mesh.mesh.flatten().tolist())
    known = _flat_of_group.setdefault(first, {})
    flat = known.get((mesh.device_type, *ranks))
    if flat is None:
        group = dist.group.WORLD
        if len(dims) < 2:
            group = first
        elif group is None or len(ranks) < group.size():
            group = _new_group(ranks, like=first, device_type=mesh.device_type)
        flat = known[mesh.device_type, *ranks] = mesh_of_group(group, mesh.device_type)
    return flat


def mesh_of_groups(
    shards: dist.ProcessGroup, replicas: dist.ProcessGroup, device_type: str | None = None
) -> DeviceMesh:
    """Return the 2-D mesh with the ranks of ``replicas`` on dim 0 and of ``shards`` on dim 1.

    This is a collective: the ranks exchange which groups they are in.

    Raises:
        ConfigError: if the groups are not the rows and columns of a grid.
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
    """Return a 2-D mesh of all processes: replicas on dim 0, shards within a machine on dim 1.

    The launcher's LOCAL_WORLD_SIZE says how many processes run on a machine. If the variable is
    missing or does not divide the world size, all processes count as one machine.
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
    """Return the accelerator's type if the default group has collectives for it, else "cpu"."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return "cpu"
    group = dist.group.WORLD
    served = group is not None and accelerator.type in _torch.device_types(group)
    return accelerator.type if served else "cpu"
