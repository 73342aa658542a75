"""Convert between full tensors and the parts that DTensors hold, on any mesh."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard._torch import dtensor as _dtensor
from fullshard._torch import mesh as _mesh
from fullshard.tensors.parts import coordinate_in, own_part, part_like
from fullshard.tensors.ragged_shard import RaggedShard
from fullshard.tensors.ragged_tensor import RaggedTensor


def taken_by(like: Tensor, value: Tensor) -> Tensor:
    """Return this rank's part of ``value``, cut as ``like``, which has the same global shape.

    Each of the two may be a DTensor or a plain tensor. A ``value`` placed like ``like``, perhaps
    also replicated over further mesh dims, needs no communication. Any other DTensor is gathered in
    full, by a collective of its mesh.
    """
    if isinstance(value, DTensor):
        if isinstance(like, DTensor) and _lies_alike(value, like):
            return _dtensor.local_of(value)
        value = value.full_tensor()
    return part_like(value, like) if isinstance(like, DTensor) else value


def _lies_alike(value: DTensor, like: DTensor) -> bool:
    """Return whether both are placed alike, apart from added mesh dims that replicate ``value``."""
    if value.device_mesh == like.device_mesh:
        return value.placements == like.placements
    own = placements_on(like, value.device_mesh)
    return own is not None and own == value.placements


def on_larger_mesh(value: DTensor, mesh: DeviceMesh) -> DTensor:
    """Return ``value`` on ``mesh``, in the same memory, replicated over the added mesh dims.

    If the mesh of ``value`` is not part of ``mesh``, ``value`` itself is returned. Ranks along the
    added dims must hold equal tensors, which is not checked.
    """
    placements = placements_on(value, mesh)
    if placements is None or value.device_mesh == mesh:
        return value
    return _placed(_dtensor.local_of(value), value, mesh, placements, type(value))


def placements_on(value: DTensor, mesh: DeviceMesh) -> tuple[Placement, ...] | None:
    """Return the placements of ``value`` on ``mesh``, matched by dim name and else Replicate.

    None if the mesh of ``value`` is not part of ``mesh``.
    """
    own, names = value.device_mesh, mesh.mesh_dim_names or ()
    mine = dict(zip(own.mesh_dim_names or (), value.placements, strict=False))
    is_part = len(mine) == own.ndim and [name for name in names if name in mine] == list(mine)
    if not is_part or any(
        own.size(dim) != mesh.size(names.index(name)) for dim, name in enumerate(mine)
    ):
        return None
    if _mesh.root_ranks(own) != _mesh.root_ranks(mesh):
        return None
    return tuple(mine.get(name, Replicate()) for name in names)


def plainly_sharded(value: DTensor, mesh: DeviceMesh | None = None) -> DTensor:
    """Return ``value`` placed with ``Shard`` and ``Replicate`` only, which every reader supports.

    Cuts that follow the cuts of later mesh dims become cuts made before these, and intervals of a
    RaggedTensor become rows. Both changes move elements, so both gather the full tensor. A tensor
    without dims is replicated.

    Args:
        value: a DTensor on any mesh.
        mesh: the mesh of the result, if the mesh of ``value`` is part of it, in any order of dims.
    """
    mesh = value.device_mesh if mesh is None else mesh
    names = value.device_mesh.mesh_dim_names or ()
    if placements_on(value, mesh) is None and set(names) != set(mesh.mesh_dim_names or ()):
        mesh = value.device_mesh
    if mesh == value.device_mesh:
        placements = value.placements
    else:
        placed = dict(zip(names, value.placements, strict=True))
        placements = tuple(placed.get(name, Replicate()) for name in mesh.mesh_dim_names or ())
    plain = tuple(_plain(one, value.ndim) for one in placements)
    if plain == placements and (mesh == value.device_mesh or placements_on(value, mesh)):
        return on_larger_mesh(value, mesh)
    full = value.full_tensor()
    part = own_part(full, plain, mesh.shape, coordinate_in(mesh)).clone()
    return _placed(part, value, mesh, plain, DTensor)


def _plain(placement: Placement, ndim: int) -> Placement:
    if isinstance(placement, RaggedShard):
        return Shard(0) if ndim else Replicate()
    if isinstance(placement, _dtensor.StridedShard):
        return Shard(placement.dim)
    return placement


def _placed(
    local: Tensor,
    like: DTensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    cls: type[DTensor],
) -> DTensor:
    spec = _dtensor.dtensor_spec(mesh, tuple(placements), shape=like.shape, dtype=local.dtype)
    kind = RaggedTensor if issubclass(cls, RaggedTensor) else DTensor
    return _dtensor.dtensor_from_spec(local.detach(), spec, requires_grad=False, cls=kind)
