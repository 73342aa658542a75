"""Meshes of parameters that are both tensor-parallel and data-parallel.

[Note: two ways to a tensor-parallel parameter]

Users pass us parameters that are already DTensors, in one of two ways.

    a tensor-parallel mesh      The parameter is a DTensor on ("tp",) or ("ep", "tp"). Users pass
                                a separate mesh of the data-parallel dims. The sharded parameter is
                                on the joint mesh ("dp", "tp"), see ``joint_mesh``.
    a full mesh                 The parameter is a DTensor on ("dp", "tp"), Replicate on "dp". Users
                                say which names are data-parallel. The sharded parameter is on the
                                same mesh, see ``SpmdMesh``. A local tensor that ``spmd_types`` has
                                annotated counts as such a DTensor, see ``annotated.py``.

In both cases a rank's local tensor is a plain tensor. The engine shards, gathers and reduces this
tensor over data-parallel ranks as if no other ranks existed. Ranks of one data-parallel group have
the same tensor-parallel coordinate, hence local tensors of the same shape.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard._torch import mesh as _mesh
from fullshard.errors import AssertedConfigError, ConfigError, UnsupportedError

_MAX_PARALLEL_DIMS = 2
_MAX_DIMS = 4


class _Apart(ConfigError, RuntimeError):
    """The error for meshes that cannot be joined."""


def joint_mesh(dp: DeviceMesh, tp: DeviceMesh) -> DeviceMesh:
    """Return the mesh (*dp dims, *tp dims) of sharded tensor-parallel parameters.

    The mesh uses the process groups of ``dp`` and ``tp``; no group is made and nothing is
    communicated. Equal inputs give the same object as long as a reference to it exists.

    Args:
        dp: mesh whose last dim shards; a dim before the last replicates.
        tp: mesh of one or two tensor- or expert-parallel dims.

    Raises:
        UnsupportedError: if ``tp`` has more than two dims.
        ConfigError: if the meshes have more than four dims together, are for different device
            types, are not orthogonal, have unnamed or common dims, or are slices of unequal meshes.
    """
    if tp.ndim > _MAX_PARALLEL_DIMS:
        raise UnsupportedError(
            f"a parameter is on a tensor-parallel mesh of {tp.ndim} dims, {tp}; at most "
            f"{_MAX_PARALLEL_DIMS} can be sharded further: flatten some of them"
        )
    if dp.ndim + tp.ndim > _MAX_DIMS:
        raise AssertedConfigError(
            f"data-parallel mesh {dp} and tensor-parallel mesh {tp} have {dp.ndim + tp.ndim} dims "
            f"together, at most {_MAX_DIMS} are possible"
        )
    if dp.device_type != tp.device_type:
        raise ConfigError(
            f"parameters are on a mesh for {tp.device_type!r}, {tp}, but are to be sharded over "
            f"one for {dp.device_type!r}, {dp}; make both from one mesh"
        )
    return joined_in_order((dp, tp))


# Weak, because a mesh keeps process groups alive. Tensors on a joint mesh hold the mesh.
_joints: weakref.WeakValueDictionary[tuple[Any, ...], DeviceMesh] = weakref.WeakValueDictionary()


def joined_in_order(meshes: tuple[DeviceMesh, ...]) -> DeviceMesh:
    """Return one mesh with all dims of ``meshes``, in order; the same object for equal meshes."""
    world = dist.group.WORLD
    assert world is not None
    # The key has the world: equal meshes of a destroyed world have dead process groups.
    key = (meshes, weakref.ref(world))
    joint = _joints.get(key)
    if joint is None:
        _check_joinable(meshes)
        try:
            joint = _mesh.joined_mesh(meshes)
        except RuntimeError as error:
            raise _Apart(
                f"{_listed(meshes)} overlap: some ranks would be met twice; each must have dims "
                "of its own of one mesh"
            ) from error
        if not _is_ascending(joint):
            joint = _of_its_own(joint, meshes)
        _joints[key] = joint
    return joint


def _check_joinable(meshes: Sequence[DeviceMesh]) -> None:
    """Refuse meshes without a common root, or without a distinct name for every dim."""
    if len({_mesh.root_ranks(mesh) for mesh in meshes}) > 1:
        raise _Apart(
            f"{_listed(meshes)} are not slices of one mesh, so that nothing is known about the "
            'ranks of both; make one with init_device_mesh(..., mesh_dim_names=("dp", "tp")) and '
            'take mesh["dp"] and mesh["tp"]'
        )
    names = [name for mesh in meshes for name in mesh.mesh_dim_names or [None]]
    if None in names:
        raise _Apart(
            f"{_listed(meshes)} have dims without a name; pass mesh_dim_names to init_device_mesh"
        )
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        raise _Apart(
            f"{_listed(meshes)} have {', '.join(twice)} in common: parameters are already sharded "
            "or replicated over these dims; pass the data-parallel dims only, such as "
            "mesh=mesh['dp']. For parameters on the full mesh, name those dims by dp_mesh_dims"
        )


def _is_ascending(mesh: DeviceMesh) -> bool:
    """Return whether the dims of ``mesh`` have the same order as in the root of ``mesh``."""
    places = {rank: i for i, rank in enumerate(_mesh.root_ranks(mesh))}
    where = [places[rank] for rank in mesh.mesh.flatten().tolist()]
    return where == sorted(where)


def _of_its_own(joint: DeviceMesh, meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return ``joint`` as a root mesh, not a part of another mesh, with the same process groups.

    To redistribute a DTensor, torch slices the root of the DTensor's mesh. It refuses dims in
    another order than in the root: tp left of dp, or a flattened dim that encloses other dims.
    """
    return DeviceMesh.from_group(
        [group for mesh in meshes for group in mesh.get_all_groups()],
        joint.device_type,
        mesh=joint.mesh.contiguous(),
        mesh_dim_names=joint.mesh_dim_names,
    )


def _listed(meshes: Sequence[DeviceMesh]) -> str:
    return " and ".join(map(str, meshes))


@dataclass(frozen=True)
class SpmdMesh:
    """A full mesh on which unsharded parameters are replicated over the data-parallel dims.

    Attributes:
        full: the mesh of the parameters that users pass.
        shard_names: dims over which parameters are sharded; empty to replicate parameters only.
        replicate_names: dims over which shards are replicated.
        shard: 1-D mesh of ``shard_names``, flattened if several; None without ``shard_names``.
        replicate: 1-D mesh of ``replicate_names``, in the same way.
    """

    full: DeviceMesh
    shard_names: tuple[str, ...]
    replicate_names: tuple[str, ...]
    shard: DeviceMesh | None
    replicate: DeviceMesh | None

    @classmethod
    def of(
        cls,
        full: DeviceMesh,
        *,
        shard: str | Sequence[str] | None = None,
        replicate: str | Sequence[str] | None = None,
    ) -> SpmdMesh:
        """Find the data-parallel dims of ``full`` by name.

        Several names make one flattened dim. The first call makes the process group of this dim by
        a collective of all ranks: call ``of`` with the same arguments on every rank.

        Raises:
            ConfigError: if there is no name, the mesh has no names, a name is unknown or given
                twice, or the names are in another order than in the mesh.
        """
        names = (names_of(shard), names_of(replicate))
        _check_names(full, names[0] + names[1])
        return cls(full, *names, *(_flattened(full, some) for some in names))

    @cached_property
    def data_parallel(self) -> DeviceMesh:
        """The mesh that the engine uses: (replicate, shard), or whichever of the two exists."""
        if self.shard is not None and self.replicate is not None:
            return joined_in_order((self.replicate, self.shard))
        one = self.shard or self.replicate
        assert one is not None
        return one

    @cached_property
    def dp_dims(self) -> tuple[int, ...]:
        """Indices of the data-parallel dims of ``full``."""
        return tuple(
            i
            for i, name in enumerate(self.full.mesh_dim_names or ())
            if name in self.shard_names or name in self.replicate_names
        )

    @cached_property
    def sharded(self) -> DeviceMesh:
        """The mesh of sharded parameters: ``full``, with several shard dims flattened into one."""
        if len(self.shard_names) < 2:
            return self.full
        return joined_in_order(self.across(lambda dim: self.full[dim], self.data_parallel))

    def across(self, other: Callable[[str], Any], flattened: Any) -> tuple[Any, ...]:
        """Return ``flattened`` and ``other(name)`` of dims that are not data-parallel, in order.

        ``flattened``, at the position of the first shard dim, covers all data-parallel dims. So
        replicate dims are just left of the flattened shard dim, wherever they were, as in torch.
        """
        along: list[Any] = []
        for name in self.full.mesh_dim_names or ():
            if name == self.shard_names[0]:
                along.append(flattened)
            elif name not in self.shard_names and name not in self.replicate_names:
                along.append(other(name))
        return tuple(along)


def names_of(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return one name, several names or None as a tuple of names."""
    return (names,) if isinstance(names, str) else tuple(names or ())


def _check_names(full: DeviceMesh, names: tuple[str, ...]) -> None:
    if not names:
        raise ConfigError(
            "dp_mesh_dims names no dim; give the data-parallel dims as shard=, replicate= or both"
        )
    if full.mesh_dim_names is None:
        raise ConfigError(
            f"dp_mesh_dims needs a mesh with names, not {full}; pass mesh_dim_names to "
            "init_device_mesh"
        )
    unknown = [name for name in names if name not in full.mesh_dim_names]
    if unknown:
        raise ConfigError(
            f"dp_mesh_dims names {unknown}, but the mesh's dims are {full.mesh_dim_names}"
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"dp_mesh_dims names a dim twice: {names}")


def _flattened(full: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    if not names:
        return None
    try:
        part = full[names]
        return part if len(names) == 1 else _mesh.flattened_mesh(part, "_".join(names))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"dims {names} of {full} cannot be made one dim {'_'.join(names)!r}: they must be in "
            "the mesh's order, and the name not taken"
        ) from error
