"""Tensor-parallel parameters: unsharded parameters as DTensors, and the placements of shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fullshard._torch import dtensor as _dtensor
from fullshard.tensors import (
    ShardPlace,
    SpmdMesh,
    parallel_spec_of,
    shard_place,
)
from tests.kit.parallel import SIZES, chunk, mesh_of, rows, shown, spec_of
from tests.ranks.pool import RankPool, on_ranks
from tests.versions import TORCH

# The unsharded parameter.


@on_ranks(4)
def test_the_whole_parameter_is_a_dtensor_over_our_memory() -> None:
    mesh = mesh_of()
    weight = rows(5)
    param = nn.Parameter(distribute(weight, mesh["tp"], [Shard(0)]))
    spec = spec_of(param)
    assert spec.placements == (Shard(0),)
    assert (spec.shape, spec.stride) == (weight.shape, weight.stride())
    assert spec.local_shape == param.to_local().shape
    assert parallel_spec_of(nn.Parameter(weight)) is None
    numel = spec.local_shape.numel()
    flat = torch.zeros(4 + numel, dtype=weight.dtype)
    view = flat.narrow(0, 4, numel).view(spec.local_shape).data
    nbytes = flat.nbytes
    flat.untyped_storage().resize_(0)
    with CommDebugMode() as comm:
        whole = spec.parameter(view, requires_grad=True)
    assert comm.get_total_counts() == 0
    assert isinstance(whole, DTensor)
    assert (whole.shape, whole.stride()) == (weight.shape, weight.stride())
    assert whole.is_leaf and whole.requires_grad and whole.grad is None
    assert not spec.parameter(view, requires_grad=False).requires_grad
    told = []
    whole.register_post_accumulate_grad_hook(lambda p: told.append(p.grad))
    flat.untyped_storage().resize_(nbytes)
    flat[4:] = param.detach().to_local().flatten()
    assert torch.equal(whole.full_tensor(), weight)
    (whole * whole).sum().backward()
    (grad,) = told
    assert isinstance(grad, DTensor)
    assert torch.equal(grad.full_tensor(), 2 * weight)
    assert torch.equal(nn.Parameter(spec.wrap(view)).full_tensor(), weight)
    half = spec.parameter(view.to(torch.bfloat16), requires_grad=True)
    assert half.dtype == torch.bfloat16 and spec.wrap(view).dtype == torch.float64


# The placements of shards.


@on_ranks(4)
def test_shards_lie_as_those_of_torch() -> None:
    mesh = mesh_of()
    for style in (ColwiseParallel, RowwiseParallel):
        torch.manual_seed(0)
        linear = parallelize_module(nn.Linear(4, 8), mesh["tp"], style())
        specs = [spec_of(param) for param in linear.parameters()]
        fsdp.fully_shard(linear, mesh=mesh["dp"])
        for spec, param in zip(specs, linear.parameters(), strict=True):
            assert isinstance(param, DTensor)
            place = shard_place(spec, mesh["dp"], 0)
            assert (place.mesh, place.placements) == (param.device_mesh, param.placements)
            assert place.mesh == mesh
    if TORCH < (2, 13):
        return  # no DataParallelMeshDims there
    # Torch refuses meshes equal to earlier ones of the process: each mesh has names of its own.
    for names, sizes, dims in [
        ("a tp", [2, 2], {"shard": "a"}),
        ("tp b", [2, 2], {"shard": "b"}),
        ("c tp", [2, 2], {"replicate": "c"}),
        ("d e tp", [1, 2, 2], {"shard": "e", "replicate": "d"}),
        ("f g h tp", [1, 2, 1, 2], {"shard": ("g", "h"), "replicate": "f"}),
    ]:
        mesh = mesh_of(names, *sizes)
        spmd = SpmdMesh.of(mesh, **dims)
        linear = nn.Linear(4, 8, bias=False)
        placed = [Shard(0) if name == "tp" else Replicate() for name in names.split()]
        linear.weight = nn.Parameter(distribute(linear.weight.detach(), mesh, placed))
        spec = spec_of(linear.weight, spmd=spmd)
        fsdp.fully_shard(linear, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(**dims))
        place = shard_place(spec, spmd.data_parallel, 0 if spmd.shard else None, spmd)
        assert place == (linear.weight.device_mesh, linear.weight.placements)


def puts_together(dp_names: str, tp_names: str, placements: list[Placement]) -> None:
    """Check that shards of even, uneven and no size, on both tensor dims, join to the parameter."""
    names = (dp_names + " " + tp_names).split()
    sizes = [2 if name in ("dp", "tp", "rep") else 1 for name in names]
    mesh = mesh_of(" ".join(names), *sizes)
    dp, tp = mesh[tuple(dp_names.split())], mesh[tuple(tp_names.split())]
    for size in SIZES:
        for dim in (0, 1):
            whole = rows(size, 5) if dim == 0 else rows(5, size)
            spec = spec_of(distribute(whole, tp, placements))
            place = shard_place(spec, dp, dim)
            assert place.divides(whole.shape)
            assert set(place.mesh.mesh_dim_names or ()) == set(mesh.mesh_dim_names or ())
            local = distribute(whole, tp, placements).to_local()
            assert torch.equal(shown(chunk(local, dp, dim), place, whole).full_tensor(), whole)


@pytest.mark.parametrize(
    ("dp", "tp", "placements"),
    [
        ("dp", "tp", [Shard(0)]),
        ("dp", "tp", [Shard(1)]),
        ("dp", "tp", [Replicate()]),
        ("rep dp", "one", [Shard(0)]),
        ("one dp", "tp", [Shard(0)]),
        ("dp", "one tp", [Shard(0), Shard(0)]),
        ("dp", "tp one", [Shard(0), Shard(1)]),
        ("one dp", "ep tp", [Shard(1), Shard(0)]),
    ],
)
def test_shards_put_together_are_the_parameter(
    pool: RankPool, dp: str, tp: str, placements: list[Placement]
) -> None:
    pool.run(4, puts_together, dp, tp, placements)


@on_ranks(4)
def test_a_cut_of_what_is_cut_already_is_strided() -> None:
    mesh = mesh_of("dp ep tp", 1, 2, 2)
    both = spec_of(distribute(rows(8), mesh["ep", "tp"], [Shard(0), Shard(0)]))
    assert shard_place(both, mesh["dp"], 0).placements == (
        _dtensor.StridedShard(0, split_factor=4),
        Shard(0),
        Shard(0),
    )
    assert shard_place(both, mesh["dp"], 1).placements == (Shard(1), Shard(0), Shard(0))
    assert shard_place(both, mesh["dp"], None).placements == (Replicate(), Shard(0), Shard(0))
    mesh = mesh_of("rep dp tp", 1, 2, 2)
    uneven = spec_of(distribute(rows(8, 3), mesh["tp"], [Shard(1)]))
    place = shard_place(uneven, mesh["rep", "dp"], 1)
    assert place.mesh.mesh_dim_names == ("rep", "tp", "dp")
    assert place.placements == (Replicate(), Shard(1), Shard(1))
    one = spec_of(distribute(rows(8, 4), mesh["tp"], [Shard(1)]))
    assert shard_place(one, mesh["rep", "dp"], 1).placements == (
        Replicate(),
        _dtensor.StridedShard(1, split_factor=2),
        Shard(1),
    )


class Sizes(tuple[int, ...]):
    """A mesh reduced to its sizes."""

    size = tuple.__getitem__


def test_a_place_knows_whether_its_strides_divide_evenly() -> None:
    strided: Any = _dtensor.StridedShard
    two = ShardPlace(Sizes((3, 2)), (strided(0, split_factor=2), Shard(0)))  # type: ignore[arg-type]
    assert [n for n in range(14) if two.divides(torch.Size((n, 4)))] == [0, 6, 12]
    left = ShardPlace(Sizes((2, 3, 2)), (Shard(1), strided(1, split_factor=2), Shard(1)))  # type: ignore[arg-type]
    assert not left.divides(torch.Size((12, 14)))
    assert left.divides(torch.Size((7, 12)))
    assert ShardPlace(two.mesh, (Shard(1), Shard(0))).divides(torch.Size((7, 7)))
