"""Device meshes. A mesh and its slices share the rank list of their root; each dim divides it."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from fullshard._torch.dtensor import DTensorSpec
from fullshard._torch.names import VERSION, Private

private = Private(__name__, "DTensors on several meshes")

RECOVERY = "`fullshard.resilient`"
_CACHES = [
    # As ``torch.distributed.tensor.debug`` does, which imports the compiler.
    private.get(f"torch.distributed.tensor.{name}", RECOVERY)
    for name in (
        "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear",
        "_sharding_prop.ShardingPropagator._propagate_tensor_meta_cached.cache_clear",
        "_redistribute.clear_redistribute_planner_cache",
        "_redistribute._gen_transform_infos.cache_clear",
        "_collective_utils.MeshTopoInfo.build_from_mesh.cache_clear",
    )
]
_IN_C = "torch._C._clear_DTensor_sharding_propagator_cache"
_CACHES.append(private.get(_IN_C, "a cache of DTensor in C++", instead=bool))
if VERSION < (2, 12):
    _OpStrategy = private.get("torch.distributed.tensor._op_schema.OpStrategy")


def forget_meshes() -> None:
    """Clear what DTensor remembers by mesh.

    All meshes of a shape are equal: it would hand out meshes whose groups are gone, or now are
    others. And a mesh keeps the threads of its groups, which wake up a hundred times a second.
    """
    for clear in _CACHES:
        clear()
    if VERSION < (2, 12):  # its dispatcher keeps some for ever, where nobody reaches them
        for one in gc.get_objects():
            if type(one) is DTensorSpec:
                object.__setattr__(one, "mesh", None)
            elif type(one) is _OpStrategy:
                one.strategies.clear()


def root_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the ranks of the root mesh of ``mesh``, in order; equal for equal roots."""
    return mesh._flatten_rank_map


def joined_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with all dims of ``meshes``, named slices of one root, and their groups.

    Raises:
        RuntimeError: if the slices have different roots, or overlap.
    """
    return DeviceMesh._concatenate(list(meshes))


def flattened_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return ``mesh`` as a 1-D mesh; the first call makes its group, a collective of all ranks.

    Raises:
        ValueError: if ``name`` belongs to other dims.
    """
    return mesh._flatten(name)


private.attributes(
    "torch.distributed.device_mesh.DeviceMesh", "_concatenate _flatten _flatten_rank_map"
)
