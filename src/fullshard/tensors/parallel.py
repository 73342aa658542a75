"""Placements of parameters that users pass as DTensors: of unsharded ones, and of their shards.

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
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fullshard._torch import dtensor as _dtensor
from fullshard.comm import mesh_of_dim
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.tensors.annotated import Annotation
from fullshard.tensors.parallel_mesh import SpmdMesh, joined_in_order, joint_mesh
from fullshard.tensors.ragged_shard import RaggedShard


@dataclass(frozen=True)
class ParallelSpec:
    """The placement of one parameter before data parallelism shards it.

    Attributes:
        mesh: mesh of the parameter as modules see it: the tensor-parallel mesh or the full mesh.
        placements: on ``mesh``; Replicate on the data-parallel dims of a full mesh.
        shape, stride: shape and stride of the global tensor.
        local_shape: shape of this rank's part, which may be empty. It differs between ranks if the
            tensor-parallel cut is uneven, so no decision that ranks must agree on may use it.
        dp_dims: the data-parallel dims of ``mesh``; empty for a tensor-parallel mesh.
        annotation: the annotation of a parameter that modules see as a plain local tensor; None if
            modules see a DTensor.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    local_shape: torch.Size
    dp_dims: tuple[int, ...] = ()
    annotation: Annotation | None = None
    _specs: dict[tuple[tuple[Placement, ...], torch.dtype], _dtensor.DTensorSpec] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def over_others(self) -> ShardPlace:
        """Mesh and placements on the dims that are not data-parallel, if there are any."""
        dims = [dim for dim in range(self.mesh.ndim) if dim not in self.dp_dims]
        placements = tuple(self.placements[dim] for dim in dims)
        if not self.dp_dims:
            return ShardPlace(self.mesh, placements)
        names = self.mesh.mesh_dim_names or ()
        return ShardPlace(self.mesh[tuple(names[dim] for dim in dims)], placements)

    @property
    def may_sum_gradients(self) -> bool:
        """Return whether gradients may be pending sums over dims that are not data-parallel."""
        kind, shown = (
            (Replicate, self.placements)
            if self.annotation is None
            else (Partial, self.annotation.gradients)
        )
        others = (dim for dim in range(self.mesh.ndim) if dim not in self.dp_dims)
        return any(isinstance(shown[dim], kind) for dim in others)

    def wrap(self, local: Tensor) -> DTensor:
        """Return the parameter as a DTensor around ``local``, plain and of shape ``local_shape``.

        Both share storage, which may be empty and filled later. No communication, no autograd.
        """
        spec = self.spec_for(self.placements, local.dtype)
        return _dtensor.dtensor_around(local, spec, requires_grad=False, cls=DTensor)

    def parameter(self, local: Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Return ``wrap(local)`` as an autograd leaf, whose gradients are DTensors.

        The leaf keeps the storage offset of ``local``, which compilers need. Because of this offset
        ``copy.deepcopy`` refuses the leaf. An annotated leaf is ``local`` itself.
        """
        if self.annotation is None:
            return nn.Parameter(self.wrap(local), requires_grad=requires_grad)
        param = nn.Parameter(local, requires_grad=requires_grad)
        self.annotation.put_on(param)
        return param

    def spec_for(
        self, placements: tuple[Placement, ...], dtype: torch.dtype
    ) -> _dtensor.DTensorSpec:
        """Return the spec of a tensor of this global shape with ``placements`` on ``mesh``."""
        spec = self._specs.get((placements, dtype))
        if spec is None:
            spec = self._specs[placements, dtype] = _dtensor.dtensor_spec(
                self.mesh, placements, shape=self.shape, stride=self.stride, dtype=dtype
            )
        return spec


def parallel_spec_of(
    param: Tensor, *, name: str = "", spmd: SpmdMesh | None = None
) -> ParallelSpec | None:
    """Return the placement of ``param`` before data parallelism; None for a plain tensor.

    An annotated plain tensor is placed as its annotation says.

    Args:
        param: the user's parameter; its values are not read, so it may be on ``meta``.
        name: fully qualified name (FQN), for error messages.
        spmd: the full mesh that parameters must be on, if the user named its data-parallel dims.

    Raises:
        ConfigError: with ``spmd``, if ``param`` is not a DTensor, is on a mesh that is not equal
            to ``spmd.full``, or is not replicated over the data-parallel dims. Also if its
            annotation does not fit ``spmd``.
        UnsupportedError: if ``param`` has a Partial placement.
    """
    annotation = Annotation.of(param, spmd)
    if annotation is not None and spmd is not None:
        shape = annotation.global_shape(param.shape, spmd.full)
        return ParallelSpec(
            mesh=spmd.full,
            placements=annotation.placements,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
            local_shape=param.shape,
            dp_dims=spmd.dp_dims,
            annotation=annotation,
        )
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
        local_shape=_dtensor.local_of(param).shape,
        dp_dims=spmd.dp_dims if spmd else (),
    )


def _check_spmd(param: Tensor, name: str, spmd: SpmdMesh) -> None:
    what = f"parameter {name!r}" if name else "a parameter"
    if not isinstance(param, DTensor):
        raise ConfigError(
            f"{what} is a plain tensor; with dp_mesh_dims all parameters must be DTensors on the "
            "full mesh (use distribute_tensor or distribute_module), or annotated by spmd_types"
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
    """The mesh and placements of a parameter's shards as DTensors."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def divides(self, shape: torch.Size) -> bool:
        """Return whether each tensor dim with a strided cut is divided evenly by all its cuts.

        If not, ``full_tensor()`` is right, but ``distribute_tensor`` onto such placements fails
        for some sizes, and for other sizes the offsets that torch computes, which distributed
        checkpoints store, are wrong (torch 2.13). The answer is the same on all ranks.
        """
        strided = {p.dim for p in self.placements if isinstance(p, _dtensor.StridedShard)}
        for dim in strided:
            cuts = [i for i, p in enumerate(self.placements) if _dtensor.sharded_dim(p) == dim]
            if shape[dim] % math.prod(self.mesh.size(i) for i in cuts):
                return False
        return True


def shard_place(
    spec: ParallelSpec,
    dp: DeviceMesh,
    cut: int | RaggedShard | None,
    spmd: SpmdMesh | None = None,
) -> ShardPlace:
    """Return the place of local tensors that are cut over ``dp``.

    The mesh joins the data-parallel dims and the others. A tensor-parallel mesh follows ``dp``, and
    always follows intervals. On a full mesh, the cut is at the position of the shard dim; several
    shard dims become one flattened dim. A cut that DTensor calls strided, and that does not divide
    the tensor evenly, moves behind the dims that cut before it: every part of DTensor supports
    that order, see ``ShardPlace.divides``.

    Args:
        spec: placement of a parameter before data parallelism.
        dp: mesh whose last dim shards; a dim before the last replicates.
        cut: the tensor dim, not negative, that is cut like ``torch.chunk``, or intervals of the
            local tensor; None if ``dp`` only replicates.
        spmd: the full mesh of ``spec``, if its data-parallel dims were named.

    Raises:
        ConfigError, UnsupportedError: if the meshes do not fit, see ``joint_mesh``.
    """
    replicas = (Replicate(),) * (dp.ndim - 1)
    if isinstance(cut, RaggedShard):
        if len(spec.dp_dims) == spec.mesh.ndim:
            return ShardPlace(dp, (*replicas, cut))
        others = spec.over_others
        return ShardPlace(joint_mesh(dp, others.mesh), (*replicas, cut, *others.placements))
    if spmd is None:
        own = Replicate() if cut is None else _cut(cut, spec.mesh, spec.placements)
        usual = ShardPlace(joint_mesh(dp, spec.mesh), (*replicas, own, *spec.placements))
    elif cut is None:
        usual = ShardPlace(spmd.full, spec.placements)
    else:
        usual = _on_full_mesh(spec, spmd, cut)
    if cut is None or usual.divides(spec.shape):
        return usual
    others = spec.over_others
    meshes = [mesh_of_dim(dp, dim) for dim in range(dp.ndim)]
    mesh = joined_in_order((*meshes[:-1], others.mesh, meshes[-1]))
    return ShardPlace(mesh, (*replicas, *others.placements, Shard(cut)))


def _on_full_mesh(spec: ParallelSpec, spmd: SpmdMesh, dim: int) -> ShardPlace:
    names = spmd.full.mesh_dim_names or ()
    placed = dict(zip(names, spec.placements, strict=True))
    # Mesh dims to the left cut the tensor first, in DTensor's order and in ours.
    placement = _cut(dim, spec.mesh, spec.placements, names.index(spmd.shard_names[0]) + 1)
    if len(spmd.shard_names) == 1:
        placed[spmd.shard_names[0]] = placement
        return ShardPlace(spmd.full, tuple(placed.values()))
    flattened = [Replicate(), placement] if spmd.replicate_names else [placement]
    along = spmd.across(lambda name: [placed[name]], flattened)
    return ShardPlace(spmd.sharded, tuple(one for some in along for one in some))


def _cut(dim: int, mesh: DeviceMesh, placements: Sequence[Placement], first: int = 0) -> Placement:
    """Return the placement of a data-parallel cut that follows cuts by mesh dims from ``first``.

    DTensor applies placements from left to right. If a mesh dim to the right has cut the same
    tensor dim before us, each resulting piece is cut again, which DTensor calls strided.
    """
    factor = math.prod(
        mesh.size(i)
        for i, placement in enumerate(placements)
        if i >= first and _dtensor.sharded_dim(placement) == dim
    )
    return _dtensor.StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)
