"""``shard_placement_fn``: the tensor dim and the mesh on which single parameters are cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard.errors import AssertedConfigError, ConfigError
from fullshard.frontend.meshes import DataMesh, data_mesh
from fullshard.frontend.ownership import PlacedParam


@dataclass(frozen=True)
class ShardPlacementResult:
    """A result of ``shard_placement_fn`` for a parameter on another mesh, such as an expert's."""

    placement: Shard | None
    """The tensor dim to cut; None: dim 0, or the choice of the layout."""
    mesh_info: Any
    """A mesh, 1-D to shard over or 2-D to replicate and shard over. PyTorch's own mesh infos, which
    name the dims of their mesh, are accepted as well."""


PlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]
"""The type of ``shard_placement_fn``: returns a dim, a dim and a mesh, or None."""


class Placed(NamedTuple):
    """The choice for one parameter."""

    dim: int | None
    """Tensor dim to cut, not negative; None if no dim was chosen."""
    mesh: DataMesh


def placed(owned: PlacedParam, answer: Any, default: DataMesh) -> Placed:
    """Convert ``answer``, a result of ``shard_placement_fn``.

    Raises:
        ConfigError: if ``answer`` is of a wrong type, or a dim that the parameter does not have.
    """
    mesh = default
    if hasattr(answer, "mesh_info") and hasattr(answer, "placement"):
        mesh = _mesh_of(owned, answer.mesh_info, default)
        answer = answer.placement
    if answer is None:
        return Placed(None, mesh)
    if not isinstance(answer, Shard):
        raise ConfigError(
            f"shard_placement_fn: got {answer!r} for parameter {owned.name}, expected "
            "Shard(dim), a ShardPlacementResult or None"
        )
    if mesh.shard_dim is None:
        raise ConfigError(
            f"shard_placement_fn: got {answer!r} for parameter {owned.name}, but parameters are "
            "only replicated over this mesh; return None"
        )
    num_dims = owned.param.dim()
    if not -num_dims <= answer.dim < num_dims:
        raise AssertedConfigError(
            f"shard_placement_fn: got {answer} for parameter {owned.name} of shape "
            f"{tuple(owned.param.shape)}, expected a dim below {num_dims}"
        )
    return Placed(answer.dim % num_dims, mesh)


def _mesh_of(owned: PlacedParam, info: Any, default: DataMesh) -> DataMesh:
    mesh = getattr(info, "mesh", None)
    if isinstance(info, DeviceMesh):
        found = data_mesh(info)
    elif isinstance(mesh, DeviceMesh) and hasattr(info, "shard_mesh_dim"):
        found = DataMesh(mesh, info.shard_mesh_dim, getattr(info, "replicate_mesh_dim", None))
        used = {found.shard_dim, found.replicate_dim} - {None}
        if len(used) < mesh.ndim:
            raise ConfigError(
                f"shard_placement_fn: got mesh_info={info!r} for parameter {owned.name}, which "
                f"gives {mesh.ndim - len(used)} of {mesh.ndim} mesh dims nothing to do"
            )
    else:
        raise ConfigError(
            f"shard_placement_fn: got mesh_info={info!r} for parameter {owned.name}, expected a "
            "DeviceMesh"
        )
    if found.mesh.device_type != default.mesh.device_type:
        raise ConfigError(
            f"shard_placement_fn: got a mesh on {found.mesh.device_type} for parameter "
            f"{owned.name}, the unit is on {default.mesh.device_type}"
        )
    return found
