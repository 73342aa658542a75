"""Joint meshes of tensor-parallel and data-parallel dims, and full meshes of both."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute
from torch.distributed.tensor.debug import CommDebugMode

from fullshard._torch import dtensor as _dtensor
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.tensors import SpmdMesh, parallel_spec_of, shard_place
from fullshard.tensors.parallel_mesh import joint_mesh
from tests.kit.parallel import SIZES, chunk, mesh_of, rows, shown, spec_of
from tests.ranks.pool import RankPool, on_ranks

# Joint meshes.


@on_ranks(4)
def test_joint_meshes() -> None:
    root = mesh_of()
    with CommDebugMode() as comm:
        joint = joint_mesh(root["dp"], root["tp"])
    assert comm.get_total_counts() == 0
    assert joint == root
    assert [joint.get_group(i) for i in (0, 1)] == [root.get_group("dp"), root.get_group("tp")]
    twin = mesh_of()
    assert joint_mesh(twin["dp"], root["tp"]) is joint
    three = mesh_of("pp dp tp", 2, 1, 2)
    assert joint_mesh(three["dp"], three["tp"]) == three["dp", "tp"]
    # Torch does not redistribute on a mesh with tensor-parallel dims left of data-parallel ones.
    turned = mesh_of("tp dp")
    whole = rows(8)
    param = distribute(whole, turned["tp"], [Shard(0)])
    place = shard_place(spec_of(param), turned["dp"], 0)
    local = chunk(param.to_local(), turned["dp"], 0)
    assert place.mesh.mesh_dim_names == ("dp", "tp")
    assert torch.equal(shown(local, place, whole).full_tensor(), whole)
    assert joint_mesh(turned["dp"], turned["tp"]) is place.mesh


def forgets() -> int:
    """Return the id of a joint mesh whose process group is destroyed."""
    root = mesh_of()
    joint = joint_mesh(root["dp"], root["tp"])
    total = torch.ones(1)
    dist.all_reduce(total, group=joint.get_group("tp"))
    assert total == 2
    dist.destroy_process_group()
    gc.collect()
    return id(joint)


def test_joint_meshes_of_a_destroyed_group_are_not_used_again(pool: RankPool) -> None:
    pool.run(4, forgets)
    pool.run(4, forgets)


def own_pair() -> DeviceMesh:
    """Return a mesh that contains only this rank and one other."""
    first = dist.get_rank() // 2 * 2
    groups = [dist.new_group([i, i + 1]) for i in (0, 2)]
    return DeviceMesh.from_group(groups[first // 2], "cpu", mesh_dim_names=("pair",))


@on_ranks(4)
def test_meshes_that_do_not_belong_together_are_refused() -> None:
    root = mesh_of()
    flat = init_device_mesh("cpu", (4,))
    deep = mesh_of("a b c", 1, 2, 2)
    five = mesh_of("r s d e t", 1, 1, 1, 2, 2)
    meta = DeviceMesh(
        "meta", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"), _init_backend=False
    )
    cases: list[tuple[DeviceMesh, DeviceMesh, tuple[type[Exception], ...], str]] = [
        (root["dp"], root["dp"], (ConfigError, RuntimeError), "in common"),
        (root["dp"], mesh_of("x y")["x"], (ConfigError, RuntimeError), "overlap"),
        (root["dp"], root, (ConfigError, RuntimeError), "in common"),
        (flat, root["tp"], (ConfigError, RuntimeError), "without a name"),
        (own_pair(), root["tp"], (ConfigError, RuntimeError), "not slices of one mesh"),
        (root["dp"], meta, (ConfigError, ValueError), "'meta'"),
        (deep["a"], deep, (UnsupportedError, NotImplementedError), "3 dims"),
        (five["r", "s", "d"], five["e", "t"], (ConfigError, AssertionError), "5 dims"),
    ]
    for dp, tp, kinds, text in cases:
        for kind in kinds:
            with pytest.raises(kind, match=text):
                joint_mesh(dp, tp)


# Full meshes.


@on_ranks(4)
@pytest.mark.parametrize("tp", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize(
    ("names", "sizes", "dims"),
    [
        ("dp tp", [2, 2], {"shard": "dp"}),
        ("tp dp", [2, 2], {"shard": ("dp",)}),
        ("dp tp", [2, 2], {"replicate": "dp"}),
        ("rep dp tp", [2, 1, 2], {"shard": "dp", "replicate": "rep"}),
        ("rep dp tp", [1, 2, 2], {"shard": "dp", "replicate": "rep"}),
        ("dps cp tp", [2, 1, 2], {"shard": ("dps", "cp")}),
        ("dps cp tp", [2, 2, 1], {"shard": ("dps", "cp")}),
        ("dps cp", [2, 2], {"shard": ("dps", "cp")}),
        ("dps tp cp", [2, 2, 1], {"shard": ("dps", "cp")}),
        ("rep dps cp tp", [2, 1, 1, 2], {"shard": ("dps", "cp"), "replicate": "rep"}),
        ("ra rb dp tp", [1, 2, 1, 2], {"shard": "dp", "replicate": ("ra", "rb")}),
    ],
)
def test_shards_on_a_full_mesh(
    names: str, sizes: list[int], dims: dict[str, Any], tp: Placement
) -> None:
    mesh = mesh_of(names, *sizes)
    spmd = SpmdMesh.of(mesh, **dims)
    twin = mesh_of(names, *sizes)
    for size in SIZES:
        whole = rows(size, 4)
        placements = [tp if name == "tp" else Replicate() for name in names.split()]
        spec = spec_of(distribute(whole, twin, placements), spmd=spmd)
        assert spec.mesh is mesh and spec.placements == tuple(placements)
        assert [mesh.mesh_dim_names[i] for i in spec.dp_dims] == [  # type: ignore[index]
            name for name in names.split() if name != "tp"
        ]
        local = distribute(whole, mesh, placements).to_local()
        assert spec.wrap(local).placements == tuple(placements)
        piece = local if spmd.shard is None else chunk(local, spmd.shard, 0)
        cut = 0 if spmd.shard is not None else None
        place = shard_place(spec, spmd.data_parallel, cut, spmd)
        assert torch.equal(shown(piece, place, whole).full_tensor(), whole)
        usual = mesh if len(spmd.shard_names) < 2 else spmd.sharded
        assert place.mesh is usual or (tp == Shard(0) and size % 4)
    assert SpmdMesh.of(twin, **dims).sharded == spmd.sharded
    assert spmd.data_parallel.ndim == (2 if spmd.shard and spmd.replicate else 1)


@on_ranks(4)
def test_the_flattened_dim_stands_for_the_shard_dims() -> None:
    strided = _dtensor.StridedShard(0, split_factor=2)
    for names, dims, expected in [
        ("dp tp", {"shard": "dp"}, (strided, Shard(0))),
        ("tp dp", {"shard": "dp"}, (Shard(0), Shard(0))),
        ("dp tp", {"replicate": "dp"}, (Replicate(), Shard(0))),
    ]:
        mesh = mesh_of(names)
        spmd = SpmdMesh.of(mesh, **dims)
        placed = [Shard(0) if name == "tp" else Replicate() for name in names.split()]
        spec = spec_of(distribute(rows(4), mesh, placed), spmd=spmd)
        cut = 0 if spmd.shard is not None else None
        assert shard_place(spec, spmd.data_parallel, cut, spmd) == (mesh, expected)
    mesh = mesh_of("rep a b tp", 1, 2, 1, 2)
    spmd = SpmdMesh.of(mesh, shard=("a", "b"), replicate="rep")
    placed = [Replicate(), Replicate(), Replicate(), Shard(0)]
    spec = spec_of(distribute(rows(4), mesh, placed), spmd=spmd)
    place = shard_place(spec, spmd.data_parallel, 0, spmd)
    assert place.mesh.mesh_dim_names == ("rep", "a_b", "tp")
    assert place.placements == (Replicate(), strided, Shard(0))


def on(mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return DTensor.from_local(rows(2), mesh, placements, run_check=False)


@on_ranks(4)
def test_what_is_wrong_with_a_full_mesh_is_said() -> None:
    mesh = mesh_of()
    spmd = SpmdMesh.of(mesh, shard="dp")
    for make, text in [
        (lambda: SpmdMesh.of(mesh), "names no dim"),
        (lambda: SpmdMesh.of(mesh, shard=()), "names no dim"),
        (lambda: SpmdMesh.of(init_device_mesh("cpu", (4,)), shard="dp"), "mesh with names"),
        (lambda: SpmdMesh.of(mesh, shard="pp"), r"\['pp'\]"),
        (lambda: SpmdMesh.of(mesh, shard="dp", replicate="dp"), "twice"),
        (lambda: SpmdMesh.of(mesh, shard=("tp", "dp")), "order"),
        (lambda: parallel_spec_of(rows(4), name="a.b", spmd=spmd), "'a.b' is a plain tensor"),
        (lambda: parallel_spec_of(on(mesh, Shard(0), Shard(1)), spmd=spmd), "'dp' it must be"),
        (lambda: parallel_spec_of(on(mesh, Partial(), Shard(1)), spmd=spmd), "'dp' it must be"),
        (lambda: parallel_spec_of(on(mesh["tp"], Shard(0)), spmd=spmd), "lies on"),
        (lambda: parallel_spec_of(on(mesh_of("a b"), Replicate(), Shard(0)), spmd=spmd), "lies on"),
    ]:
        for kind in (ConfigError, ValueError):
            with pytest.raises(kind, match=text):
                make()
