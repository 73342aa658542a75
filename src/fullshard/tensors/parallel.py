"""How parameters that are DTensors already are shown whole, and where their shards lie.

See [Note: two ways to a tensor-parallel parameter].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard import _torch
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.tensors.parallel_mesh import SpmdMesh, joined_in_order, joint_mesh


@dataclass(frozen=True)
class ParallelSpec:
    """How one parameter, whole for the data-parallel ranks, lies over the other ranks.

    Attributes:
        mesh: of the parameter as modules see it: tensor-parallel, or the full mesh.
        placements: on ``mesh``; Replicate on the data-parallel dims of a full mesh.
        shape, stride: of the global tensor.
        local_shape: of this rank's part, which may be empty, and differs over ranks where the
            tensor-parallel cut is uneven: decide nothing by it that ranks must agree on.
        dp_dims: the data-parallel dims of ``mesh``, none of a tensor-parallel mesh.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    local_shape: torch.Size
    dp_dims: tuple[int, ...] = ()
    _specs: dict[torch.dtype, _torch.DTensorSpec] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def over_others(self) -> ShardPlace:
        """Where it lies on the dims that are not data-parallel, perhaps none."""
        dims = [dim for dim in range(self.mesh.ndim) if dim not in self.dp_dims]
        placements = tuple(self.placements[dim] for dim in dims)
        if not self.dp_dims:
            return ShardPlace(self.mesh, placements)
        names = self.mesh.mesh_dim_names or ()
        return ShardPlace(self.mesh[tuple(names[dim] for dim in dims)], placements)

    @property
    def may_sum_gradients(self) -> bool:
        """Whether gradients may be sums that other than data-parallel ranks have to make."""
        others = (p for dim, p in enumerate(self.placements) if dim not in self.dp_dims)
        return any(isinstance(placement, Replicate) for placement in others)

    def wrap(self, local: Tensor) -> DTensor:
        """The parameter around ``local``, a plain tensor of shape ``local_shape``.

        They share storage, which may be empty and be filled later. No communication, no autograd.
        """
        spec = self.spec_for(self.placements, local.dtype)
        return _torch.dtensor_around(local, spec, requires_grad=False, cls=DTensor)

    def parameter(self, local: Tensor, *, requires_grad: bool) -> nn.Parameter:
        """``wrap`` as a leaf of autograd, whose gradients are DTensors.

        It takes over where ``local`` begins within its storage: compilers need that. For the same
        reason ``copy.deepcopy`` refuses it.
        """
        return nn.Parameter(self.wrap(local), requires_grad=requires_grad)

    def spec_for(self, placements: tuple[Placement, ...], dtype: torch.dtype) -> _torch.DTensorSpec:
        """That of a tensor of the same global shape, placed like this on ``mesh``."""
        spec = self._specs.get(dtype) if placements is self.placements else None
        if spec is None:
            spec = _torch.dtensor_spec(
                self.mesh, placements, shape=self.shape, stride=self.stride, dtype=dtype
            )
            if placements is self.placements:
                self._specs[dtype] = spec
        return spec


def parallel_spec_of(
    param: Tensor, *, name: str = "", spmd: SpmdMesh | None = None
) -> ParallelSpec | None:
    """How ``param`` lies over other than data-parallel ranks; None for a plain tensor.

    Args:
        param: as the user made it; its values are not looked at, it may be on ``meta``.
        name: fully qualified, for messages.
        spmd: the full mesh that parameters must be on, where the user named its dims.

    Raises:
        ConfigError: with ``spmd``, a parameter that is no DTensor, is on a mesh that is not equal
            to ``spmd.full``, or is not replicated over the data-parallel dims.
    """
    if spmd is not None:
        _check_spmd(param, name, spmd)
    if not isinstance(param, DTensor):
        return None
    if any(placement.is_partial() for placement in param.placements):
        raise UnsupportedError(
            f"it is placed {param.placements}: a sum that is still to be made cannot be a "
            "parameter; redistribute it first"
        )
    return ParallelSpec(
        mesh=spmd.full if spmd else param.device_mesh,
        placements=tuple(param.placements),
        shape=param.shape,
        stride=param.stride(),
        local_shape=_torch.local_of(param).shape,
        dp_dims=spmd.dp_dims if spmd else (),
    )


def _check_spmd(param: Tensor, name: str, spmd: SpmdMesh) -> None:
    what = f"parameter {name!r}" if name else "a parameter"
    if not isinstance(param, DTensor):
        raise ConfigError(
            f"{what} is a plain tensor; with dp_mesh_dims all parameters must be DTensors on the "
            "full mesh: use distribute_tensor or distribute_module"
        )
    if param.device_mesh != spmd.full:
        raise ConfigError(
            f"{what} lies on {param.device_mesh}, not on {spmd.full}, which was given with "
            "dp_mesh_dims; distribute it on that mesh"
        )
    for dim in spmd.dp_dims:
        if not isinstance(param.placements[dim], Replicate):
            raise ConfigError(
                f"{what} is placed {param.placements}; on the data-parallel dim "
                f"{(spmd.full.mesh_dim_names or ())[dim]!r} it must be Replicate()"
            )


class ShardPlace(NamedTuple):
    """Where the shards of a parameter, as DTensors, lie."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def divides(self, shape: torch.Size) -> bool:
        """Whether what cuts a tensor dim in strides divides it evenly, with all that cut it too.

        If not, ``full_tensor()`` is right, but ``distribute_tensor`` onto such placements fails
        for some sizes, and for some the offsets that torch computes, which distributed checkpoints
        store, are not those of the data (torch 2.13). The answer is the same on all ranks.
        """
        strided = {p.dim for p in self.placements if isinstance(p, _torch.StridedShard)}
        for dim in strided:
            cuts = [i for i, p in enumerate(self.placements) if _torch.sharded_dim(p) == dim]
            if shape[dim] % math.prod(self.mesh.size(i) for i in cuts):
                return False
        return True


def shard_place(spec: ParallelSpec, dp: DeviceMesh, dim: int | None) -> ShardPlace:
    """Where local tensors, cut as ``torch.chunk`` does on ``dim`` over ``dp``, lie.

    Args:
        spec: of a parameter on a tensor-parallel mesh.
        dp: shards over its last dim; a dim before that replicates.
        dim: tensor dim, not negative; None if ``dp`` only replicates.

    Raises:
        ConfigError, UnsupportedError: the meshes do not fit, see ``joint_mesh``.
    """
    mesh = joint_mesh(dp, spec.mesh)
    cut = Replicate() if dim is None else _cut(dim, spec.mesh, spec.placements)
    return ShardPlace(mesh, (*([Replicate()] * (dp.ndim - 1)), cut, *spec.placements))


def spmd_shard_place(spec: ParallelSpec, spmd: SpmdMesh, dim: int) -> ShardPlace:
    """The same for a parameter on a full mesh.

    One shard dim takes the cut where it stands in the mesh; several are one flattened dim.
    """
    names = spmd.full.mesh_dim_names or ()
    placed = dict(zip(names, spec.placements, strict=True))
    if not spmd.shard_names:
        return ShardPlace(spmd.full, spec.placements)
    first = names.index(spmd.shard_names[0]) + 1
    # Dims to the left have cut the tensor before, in DTensor's order as in ours.
    cut = _cut(dim, spec.mesh, spec.placements, first)
    if len(spmd.shard_names) == 1:
        placed[spmd.shard_names[0]] = cut
        return ShardPlace(spmd.full, tuple(placed.values()))
    flattened = [Replicate(), cut] if spmd.replicate_names else [cut]
    along = spmd.across(lambda name: [placed[name]], flattened)
    return ShardPlace(spmd.sharded, tuple(one for some in along for one in some))


def place_in_order_of_cuts(
    spec: ParallelSpec, replicate: DeviceMesh | None, shard: DeviceMesh, dim: int
) -> ShardPlace:
    """The same place in words that every part of DTensor understands, whatever the sizes.

    The data-parallel dim stands right of those that have cut the tensor before it, on a mesh of
    its own order: for what does not divide, see ``ShardPlace.divides``.
    """
    others = spec.over_others
    meshes = [replicate] if replicate is not None else []
    mesh = joined_in_order((*meshes, others.mesh, shard))
    return ShardPlace(mesh, (*([Replicate()] * len(meshes)), *others.placements, Shard(dim)))


def _cut(dim: int, mesh: DeviceMesh, placements: Sequence[Placement], first: int = 0) -> Placement:
    """The placement of a data-parallel cut made after those of mesh dims from ``first`` on.

    DTensor applies placements from left to right. Where a dim to the right has cut the same
    tensor dim before us, each of its pieces is cut, which DTensor calls strided.
    """
    factor = math.prod(
        mesh.size(i)
        for i, placement in enumerate(placements)
        if i >= first and _torch.sharded_dim(placement) == dim
    )
    return _torch.StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)
