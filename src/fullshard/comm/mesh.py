"""Meshes and the collectives of their process groups."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard._torch import collectives as _collectives
from fullshard._torch import world as _world
from fullshard.comm.c10d import C10d, transferred
from fullshard.comm.protocol import Collectives, SingleRank
from fullshard.errors import ConfigError

Wire = Callable[[dist.ProcessGroup, str], Collectives]
"""A function that makes the collectives for a process group and a device type."""

# One object per group and wire, whoever uses the group.
_of_group = weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, Collectives]]()
_wire: Wire = C10d  # no ContextVar: ranks that are threads share the choice of their process
_parts_of_group = weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]]()
_flat_of_group = weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, DeviceMesh]]()

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
    options = _collectives.group_options(like, connects_later=True)
    with _world.apart_from_the_default_group(options):
        group: dist.ProcessGroup = dist.new_group(
            ranks,
            timeout=_collectives.timeout_of(like, device_type),
            backend=dist.get_backend_config(like),
            pg_options=options,
            use_local_synchronization=True,
        )
    return group


def collectives_of_group(group: dist.ProcessGroup, device_type: str) -> Collectives:
    """Return the collectives of ``group`` on a device type."""
    kinds = _of_group.setdefault(group, {})
    collectives = kinds.get(key := (_wire, device_type))
    if collectives is None:
        alone = group.size() == 1
        collectives = kinds[key] = SingleRank() if alone else _wire(group, device_type)
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
    types = (_collectives.device_types(mesh.get_group(dim)) for dim in range(mesh.ndim))
    return sorted(set.intersection(*map(set, types)))


def served_by(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return ``device`` if ``group`` communicates on it, else a device on which it does."""
    served = _collectives.device_types(group)
    if device.type in served:
        return device
    kind = next(iter(served))
    if kind == "cpu":
        return torch.device(kind)
    return group.bound_device_id or torch.device(
        kind, torch.get_device_module(kind).current_device()
    )


def default_mesh(device_type: str | None = None) -> DeviceMesh:
    """Return the 1-D mesh of all processes, on the accelerator if the default group supports it.

    If there is no default process group, make one: from the launcher's environment variables, or
    with a world size of 1 if no launcher started this process.
    """
    if not dist.is_initialized():
        _init_process_group()
    group, kind = dist.group.WORLD, device_type or _device_type()
    if group is not None and kind == "cpu":
        return mesh_of_group(group, kind)  # init_device_mesh makes another group if there are GPUs
    return init_device_mesh(kind, (dist.get_world_size(),))


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
    """Return a 1-D mesh of all ranks of ``mesh``, in ascending order.

    All calls for one mesh return equal meshes.
    The first call for a mesh with several dims of more than one rank makes a process group, a
    collective of its ranks, unless the mesh has all ranks there are.
    """
    dims = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    first = mesh.get_group(dims[0] if dims else 0)
    if len(dims) < 2:
        return mesh_of_group(first, mesh.device_type)
    ranks = sorted(mesh.mesh.flatten().tolist())
    known = _flat_of_group.setdefault(first, {})
    flat = known.get((mesh.device_type, *ranks))
    if flat is None:
        group = dist.group.WORLD
        if group is None or len(ranks) < group.size():
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
    own = dist.get_process_group_ranks(shards)
    transferred(replicas, "ranks", lambda: dist.all_gather_object(rows, own, group=replicas))
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
    device = _world.device_to_bind()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(device_id=device)
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, device_id=device)


def _device_type() -> str:
    """Return the accelerator's type if the default group has collectives for it, else "cpu"."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return "cpu"
    group = dist.group.WORLD
    served = group is not None and accelerator.type in _collectives.device_types(group)
    return accelerator.type if served else "cpu"
