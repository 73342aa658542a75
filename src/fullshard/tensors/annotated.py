"""Parameters annotated by the package ``spmd_types``: local tensors with a type for each mesh axis.

The type describes how the ranks along an axis hold the tensor, and its gradients:

    R       equal values on all ranks; gradients are terms of a sum.
    I       equal values; equal gradients.
    S(dim)  parts along a tensor dim; gradients of the parts.

An axis is a set of ranks, which may span several dims of a mesh. Axes of one rank have no type.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fullshard._torch import dtensor as _dtensor
from fullshard.errors import ConfigError
from fullshard.tensors.parallel_mesh import SpmdMesh


def unchecked(lock: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return a context that holds ``lock``, and in which ``spmd_types`` checks no types.

    Returns ``lock`` itself if the program has not imported ``spmd_types``, to save host time.
    """
    return lock if "spmd_types" not in sys.modules else _holding(lock)


@contextmanager
def _holding(lock: AbstractContextManager[Any]) -> Iterator[None]:
    with lock, _package().no_typecheck():
        yield


def is_annotated(param: Tensor) -> bool:
    """Return whether ``param`` is a local tensor that ``spmd_types`` has annotated."""
    package = _package()
    if package is None or isinstance(param, DTensor):
        return False
    return bool(package.get_local_type(param))


def _package() -> Any:
    """Return ``spmd_types`` if the program has imported it: without it nothing is annotated."""
    return sys.modules.get("spmd_types")


@dataclass(frozen=True)
class Annotation:
    """The annotation of one parameter, and its placements on the full mesh.

    Attributes:
        types, partition: the annotation as ``spmd_types`` keeps it, with all data-parallel axes.
        placements: of the parameter on the full mesh.
        gradients: placements of the gradients that autograd leaves on the parameter.
    """

    types: Mapping[Any, Any]
    partition: Any
    placements: tuple[Placement, ...]
    gradients: tuple[Placement, ...]

    @classmethod
    def of(cls, param: Tensor, spmd: SpmdMesh | None) -> Annotation | None:
        """Return the annotation of ``param``; None if there is none.

        Raises:
            ConfigError: if there is an annotation, but ``spmd`` is None or does not fit.
        """
        if not is_annotated(param):
            return None
        if spmd is None:
            raise ConfigError(
                "it is annotated by spmd_types, but dp_mesh_dims is not given; pass the full mesh "
                "as mesh=, and dp_mesh_dims=DataParallelMeshDims(shard=...) with the names of its "
                "data-parallel dims"
            )
        package = _package()
        types, partition = dict(package.get_local_type(param)), package.get_partition_spec(param)
        full, names = spmd.full, spmd.full.mesh_dim_names or ()
        axes = [package.MeshAxis.of(full.get_group(dim)) for dim in range(full.ndim)]
        dp = [axes[dim] for dim in spmd.dp_dims]
        others = [axis for dim, axis in enumerate(axes) if dim not in spmd.dp_dims]

        def misfit(problem: str) -> ConfigError:
            return ConfigError(f"it is annotated by spmd_types as {types}, {partition}: {problem}")

        left = dict(types)  # of axes; mesh dims take theirs away
        for cut, entry in enumerate(partition or ()):
            by = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
            left.update((axis, package.S(cut)) for axis in by)
            if [axis for axis in by if axis in axes] != [axis for axis in axes if axis in by]:
                raise misfit(f"tensor dim {cut} must be cut in the order of the mesh dims")
        kinds = []
        for dim, axis in enumerate(axes):
            is_ours, is_one = dim in spmd.dp_dims, axis.size() == 1
            kind = package.R if is_ours else package.I if is_one else left.pop(axis, None)
            if kind is None or kind is package.V or kind is package.P:
                raise misfit(f"on mesh dim {names[dim]!r} it must be R, I or S(dim)")
            kinds.append(kind)
        for axis, kind in left.items():
            if axis.isorthogonal(*dp) or not axis.isorthogonal(*others):
                raise misfit(f"axis {axis} is not among the dims of the mesh, {names}")
            if kind is not package.R:
                raise misfit(f"on the data-parallel axis {axis} it must be R")
        for axis in package.current_mesh() or dp:  # those that may be left out
            if axis.isorthogonal(*types) and not axis.isorthogonal(*dp):
                types[axis] = package.R
        convert = package.spmd_type_to_dtensor_placement
        placements = tuple(convert(kind) for kind in kinds)
        gradients = tuple(convert(kind.backward_type()) for kind in kinds)
        return cls(types, partition, placements, gradients)

    def global_shape(self, local: torch.Size, mesh: DeviceMesh) -> torch.Size:
        """Return the shape of all parts together, which are as big as ``local``."""
        shape = list(local)
        for dim, placement in enumerate(self.placements):
            cut = _dtensor.sharded_dim(placement)
            if cut is not None:
                shape[cut] *= mesh.size(dim)
        return torch.Size(shape)

    def put_on(self, local: Tensor) -> None:
        """Annotate ``local``, which takes the place of the parameter."""
        _package().assert_type(local, self.types, self.partition)
