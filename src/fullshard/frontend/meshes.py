"""Meshes of data-parallel ranks: which dim shards, which one replicates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from fullshard.comm import (
    Alone,
    Collectives,
    collectives_of,
    collectives_of_part,
    default_mesh,
    device_types_of,
)
from fullshard.errors import ArgumentTypeError, ConfigError

__all__ = ["DataMesh", "checked_mesh"]


@dataclass(frozen=True)
class DataMesh:
    """A mesh, and what its dims are for; at least one of them is for something."""

    mesh: DeviceMesh
    shard_dim: int | None = 0
    """Parameters are cut over the ranks along it; None: every rank keeps all of them."""
    replicate_dim: int | None = None
    """Ranks along it hold the same; None: there is one copy."""

    @property
    def shards(self) -> Collectives:
        """The ranks that share a copy."""
        return Alone() if self.shard_dim is None else collectives_of(self.mesh, self.shard_dim)

    @property
    def replicas(self) -> Collectives | None:
        """The ranks that hold the same, if there are several."""
        if self.replicate_dim is None or self.mesh.size(self.replicate_dim) == 1:
            return None
        return collectives_of(self.mesh, self.replicate_dim)

    @property
    def num_shards(self) -> int:
        """Ranks that share a copy."""
        return 1 if self.shard_dim is None else self.mesh.size(self.shard_dim)

    def secondary(self, size: int) -> Collectives:
        """Groups of ``size`` neighbours among those that share a copy."""
        assert self.shard_dim is not None
        return collectives_of_part(self.mesh, self.shard_dim, size)

    def placements(self, cut: Placement) -> tuple[Placement, ...]:
        """Of a tensor that is cut as ``cut`` says."""
        return tuple(cut if dim == self.shard_dim else Replicate() for dim in range(self.mesh.ndim))


def checked_mesh(mesh: Any) -> DataMesh:
    """What the user gave, or the default: shard, or, with two dims, replicate and shard.

    Raises:
        ArgumentTypeError: it is no mesh.
        ConfigError: it has more dims, or two without names, or cannot communicate.
    """
    if mesh is None:
        mesh = default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(
            f"fully_shard(mesh=...): got {type(mesh).__name__}, expected a DeviceMesh or None"
        )
    if mesh.ndim not in (1, 2):
        raise ConfigError(f"fully_shard(mesh=...): got {mesh.ndim} mesh dims, expected 1 or 2")
    if mesh.ndim == 2 and not mesh.mesh_dim_names:
        raise _Unnamed(
            f"fully_shard(mesh=...): got a mesh of shape {tuple(mesh.shape)} without names, "
            "expected mesh_dim_names=(...), so that it is plain which dim replicates (the first) "
            "and which one shards"
        )
    served = device_types_of(mesh)
    if mesh.device_type not in served:
        raise ConfigError(
            f"fully_shard: the mesh is on {mesh.device_type}, its process group communicates on "
            f"{', '.join(served)} only; init_process_group('cpu:gloo,cuda:nccl') serves both"
        )
    return DataMesh(mesh) if mesh.ndim == 1 else DataMesh(mesh, shard_dim=1, replicate_dim=0)


class _Unnamed(ConfigError, AssertionError):
    """PyTorch asserts here."""
