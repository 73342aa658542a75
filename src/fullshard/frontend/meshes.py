"""Meshes of data-parallel ranks, with the dims that shard and that replicate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard.comm import (
    SingleRank,
    collectives_of,
    collectives_of_part,
    default_mesh,
    device_types_of,
    mesh_of_dim,
)
from fullshard.errors import ArgumentTypeError, AssertedConfigError, ConfigError
from fullshard.tensors import (
    ParallelSpec,
    RaggedShard,
    ShardPlace,
    SpmdMesh,
    is_annotated,
    names_of,
    parallel_spec_of,
    shard_place,
)


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The names of the data-parallel dims in a mesh on which parameters already are DTensors.

    Each field is one name, or a tuple of names, which are flattened to one dim.

    Raises:
        ArgumentTypeError, ConfigError: if a field does not hold names, or both fields are None.
    """

    shard: str | tuple[str, ...] | None = None
    """Parameters are cut over these dims; None: parameters are only replicated, as by DDP."""
    replicate: str | tuple[str, ...] | None = None
    """Ranks along these dims hold replicas."""

    def __post_init__(self) -> None:
        for names in (self.shard, self.replicate):
            alike = names if isinstance(names, (tuple, list)) else (names,)
            if names is not None and not (alike and all(isinstance(n, str) for n in alike)):
                raise ArgumentTypeError(
                    f"DataParallelMeshDims: got {names!r}, expected the name of a mesh dim, or a "
                    "tuple of names"
                )
        if self.shard is None and self.replicate is None:
            raise ConfigError(
                "DataParallelMeshDims: got neither, expected names of mesh dims as shard=, "
                "replicate= or both"
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the dims to shard over; may be empty."""
        return names_of(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Names of the dims to replicate over; may be empty."""
        return names_of(self.replicate)


@dataclass(frozen=True)
class DataMesh:
    """A mesh of data-parallel ranks, with the roles of its dims; at least one dim has a role."""

    mesh: DeviceMesh
    shard_dim: int | None = 0
    """Parameters are cut over the ranks along this dim; None: every rank keeps full parameters."""
    replicate_dim: int | None = None
    """Ranks along this dim hold replicas; None: there is one copy."""
    spmd: SpmdMesh | None = None
    """The full mesh on which parameters are DTensors already; other dims are not data-parallel."""

    @property
    def device(self) -> torch.device:
        """This rank's device of the type of the mesh."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def facts(self, secondary: int | None) -> dict[str, Any]:
        """Return the fields of a ``BucketSpec`` on this mesh: the device, and the collectives.

        ``secondary`` is the number of neighbors that share a secondary copy, if that is possible.
        """
        shard, replicate, num_shards = self.shard_dim, self.replicate_dim, self.num_shards
        found: dict[str, Any] = {"comm": SingleRank(), "device": self.device}
        if shard is not None:
            found["comm"] = collectives_of(self.mesh, shard)
            if secondary and secondary < num_shards and not num_shards % secondary:
                found["secondary"] = collectives_of_part(self.mesh, shard, secondary)
        if replicate is not None and self.mesh.size(replicate) > 1:
            found["replicas"] = collectives_of(self.mesh, replicate)
        return found

    @property
    def num_shards(self) -> int:
        """Number of ranks that share one copy."""
        return 1 if self.shard_dim is None else self.mesh.size(self.shard_dim)

    @property
    def one_dim(self) -> DeviceMesh:
        """The 1-D mesh along which parameters are cut or, without a shard dim, replicated."""
        dim = self.shard_dim if self.shard_dim is not None else self.replicate_dim
        return mesh_of_dim(self.mesh, dim or 0)

    def parallel_spec(self, param: Tensor, name: str) -> ParallelSpec | None:
        """Return the placement of ``param`` before it is sharded here; None for a plain tensor.

        Raises:
            ConfigError: if ``param`` is not on the full mesh as required.
        """
        spmd = self.spmd
        if spmd is not None and len(spmd.dp_dims) == spmd.full.ndim:
            is_placed = isinstance(param, DTensor) or is_annotated(param)
            spmd = spmd if is_placed else None  # a plain tensor is replicated
        return parallel_spec_of(param, name=name, spmd=spmd)

    def place(self, spec: ParallelSpec | None, cut: int | RaggedShard) -> ShardPlace:
        """Return the mesh and placements of a parameter cut on a tensor dim or into intervals.

        Raises:
            ConfigError, UnsupportedError: if the parameter's mesh does not fit ours.
        """
        if spec is not None:
            dim = cut if self.shard_dim is not None or isinstance(cut, RaggedShard) else None
            return shard_place(spec, self.mesh, dim, self.spmd)
        placement = cut if isinstance(cut, RaggedShard) else Shard(cut)
        dims = range(self.mesh.ndim)
        placements = (placement if dim == self.shard_dim else Replicate() for dim in dims)
        return ShardPlace(self.mesh, tuple(placements))


def checked_mesh(mesh: Any, dp_mesh_dims: Any = None) -> DataMesh:
    """Check the user's mesh, or make the default one; two dims replicate and shard.

    Raises:
        ArgumentTypeError: if ``mesh`` is not a mesh.
        ConfigError: if ``mesh`` has more than two dims, or two without names, cannot communicate,
            or lacks a name in ``dp_mesh_dims``.
    """
    if mesh is None and dp_mesh_dims is None:
        mesh = default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(
            f"fully_shard(mesh=...): got {type(mesh).__name__}, expected a DeviceMesh"
            f"{'' if dp_mesh_dims else ' or None'}"
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"fully_shard(mesh=...): this rank is not in {mesh}; shard a module on the ranks of "
            "its mesh only"
        )
    found = _mesh_with_roles(mesh, dp_mesh_dims) if dp_mesh_dims is not None else data_mesh(mesh)
    served = device_types_of(found.mesh)
    if mesh.device_type not in served:
        raise ConfigError(
            f"fully_shard: the mesh is on {mesh.device_type}, its process group communicates on "
            f"{', '.join(served)} only; init_process_group('cpu:gloo,cuda:nccl') serves both"
        )
    return found


def data_mesh(mesh: DeviceMesh) -> DataMesh:
    """Return ``mesh`` as one with data-parallel dims only.

    Raises:
        ConfigError: if ``mesh`` has more than two dims, or two without names.
    """
    if mesh.ndim not in (1, 2):
        raise ConfigError(f"fully_shard(mesh=...): got {mesh.ndim} mesh dims, expected 1 or 2")
    if mesh.ndim == 2 and not mesh.mesh_dim_names:
        raise AssertedConfigError(
            f"fully_shard(mesh=...): got a mesh of shape {tuple(mesh.shape)} without names, "
            "expected mesh_dim_names=(...), so that it is plain which dim replicates (the first) "
            "and which one shards"
        )
    return DataMesh(mesh) if mesh.ndim == 1 else DataMesh(mesh, shard_dim=1, replicate_dim=0)


def _mesh_with_roles(mesh: DeviceMesh, dims: Any) -> DataMesh:
    if not (hasattr(dims, "shard") and hasattr(dims, "replicate")):
        raise ArgumentTypeError(
            f"fully_shard(dp_mesh_dims=...): got {type(dims).__name__}, expected a "
            "DataParallelMeshDims"
        )
    spmd = SpmdMesh.of(mesh, shard=dims.shard, replicate=dims.replicate)
    both = bool(spmd.shard_names and spmd.replicate_names)
    return DataMesh(
        spmd.data_parallel,
        shard_dim=int(both) if spmd.shard_names else None,
        replicate_dim=0 if spmd.replicate_names else None,
        spmd=spmd,
    )
