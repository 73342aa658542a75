"""Parameters with ``spmd_types`` annotations: plain local tensors in forward, else DTensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fullshard
from fullshard import DataParallelMeshDims as Dims
from fullshard import errors
from fullshard.optim import ShardedOptimizer
from tests.ranks.pool import RankPool, on_ranks
from tests.versions import TORCH

spmd: Any = pytest.importorskip(
    "spmd_types", reason="the package spmd_types is not installed", exc_type=ImportError
)

PER_PARAM, RAGGED = fullshard.PerParameter(), fullshard.Ragged()
layouts = pytest.mark.parametrize("layout", [PER_PARAM, RAGGED], ids=repr)
DIM, HIDDEN, BATCH = 6, 8, 8

TYPES = {
    "gain": spmd.R,  # each rank reads it for its own rows, so its gradients add up
    "up.weight": spmd.S(0),
    "up.bias": spmd.S(0),
    "down.weight": spmd.S(1),
    "down.bias": spmd.I,
}
"""Type of each parameter over tensor-parallel ranks."""


class Block(nn.Module):
    """A transformer block without attention; ``tp`` is None without tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(DIM))
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)
        self.tp: Any = None
        self.seen: list[tuple[type, Any, Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += [
            (type(p.data), dict(spmd.get_local_type(p)), spmd.get_partition_spec(p))
            for p in self.parameters()
        ]
        into = spmd.convert(x, self.tp, src=spmd.I, dst=spmd.R) if self.tp else x
        hidden = F.gelu(F.linear(into * self.gain, self.up.weight, self.up.bias))
        out = F.linear(hidden, self.down.weight)
        out = spmd.all_reduce(out, self.tp, src=spmd.P, dst=spmd.I) if self.tp else out
        return x + (out + self.down.bias)


def blocks() -> nn.Sequential:
    model = nn.Sequential(Block(), Block()).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=param.dtype))
    return model


def mesh_of(names: str = "dp tp", *sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes or (2, 2), mesh_dim_names=tuple(names.split()))


def annotate(model: nn.Sequential, mesh: DeviceMesh, axes: dict[str, Any]) -> None:
    """Shard each block's parameters over "tp"; annotate them for "tp" and for ``axes``."""
    names = mesh.mesh_dim_names or ()
    for block in model:
        tp = mesh["tp"].get_group() if "tp" in names else None
        block.tp = tp
        for name, kind in TYPES.items():
            module, key = block.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            value = getattr(module, key).detach()
            if tp is not None and isinstance(kind, spmd.Shard):
                value = value.chunk(dist.get_world_size(tp), kind.dim)[dist.get_rank(tp)]
            param = nn.Parameter(value.contiguous())
            module.register_parameter(key, param)
            spmd.assert_type(param, axes | ({tp: kind} if tp is not None else {}))


def number_of(mesh: DeviceMesh, names: tuple[str, ...]) -> tuple[int, int]:
    """Return this rank's number in the dims ``names``, and the number of ranks there."""
    number, size = 0, 1
    for name in names:
        number = number * mesh[name].size() + mesh[name].get_local_rank()
        size *= mesh[name].size()
    return number, size


def train(
    model: nn.Module,
    number: int = 0,
    size: int = 1,
    around: Callable[[], Any] = nullcontext,
    optimizer: Any = None,
    limit: float | None = None,
) -> list[Any]:
    """Return the first step's gradients, the norms if clipped, and the final parameters."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    grads: list[Any] = []
    norms: list[Any] = []
    for step in range(3):
        x = torch.linspace(-1, 1, BATCH * DIM, dtype=torch.float64).view(BATCH, DIM).roll(step, 0)
        x = x.chunk(size)[number]
        with around():
            if spmd.is_type_checking():
                spmd.assert_type(x, {"dp": spmd.V, "tp": spmd.I})
            loss = model(x).square().mean()
            if spmd.is_type_checking():
                loss = spmd.reinterpret(loss, "dp", src=spmd.V, dst=spmd.P)
            loss.backward()
        grads = grads or [param.grad.detach().clone() for param in model.parameters()]
        if limit is not None:
            norms.append(fullshard.optim.clip_grad_norm_(model.parameters(), limit))
        optimizer.step()
        optimizer.zero_grad()
    return [*grads, *norms, *model.parameters()]


def full(tensors: list[Any]) -> list[Tensor]:
    return [(one.full_tensor() if isinstance(one, DTensor) else one).detach() for one in tensors]


def sharded(
    mesh: DeviceMesh,
    dims: Any,
    engine: Any = fullshard.fully_shard,
    omits_dp: bool = False,
    **options: Any,
) -> nn.Sequential:
    model = blocks()
    dp = dims.replicate, dims.shard
    names = [n for some in dp for n in ((some,) if isinstance(some, str) else some or ())]
    axes = {mesh.get_group(name): spmd.R for name in names}
    if "tp" not in (mesh.mesh_dim_names or ()):
        axes = {dist.group.WORLD: spmd.R}  # one axis for both dims, as in torchtitan
    annotate(model, mesh, {} if omits_dp else axes)
    for block in model:
        engine(block, mesh=mesh, dp_mesh_dims=dims, **options)
    engine(model, mesh=mesh, dp_mesh_dims=dims, **options)
    return model


def distance(found: list[Any], expected: list[Any]) -> float:
    pairs = zip(full(found), full(expected), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


SHAPES = [
    ((2, 2), "dp tp", Dims(shard="dp")),
    ((2, 2), "tp dp", Dims(shard="dp")),
    ((2, 2), "dp tp", Dims(replicate="dp")),
    ((2, 2), "rep dp", Dims(shard="dp", replicate="rep")),
    ((1, 2, 2), "rep dp tp", Dims(shard="dp", replicate="rep")),
    ((2, 2, 1), "rep dp tp", Dims(shard="dp", replicate="rep")),
    ((1, 2, 2), "dp cp tp", Dims(shard=("dp", "cp"))),
    ((4,), "dp", Dims(shard="dp")),
]


@on_ranks(4)
@layouts
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize(("shape", "names", "dims"), SHAPES, ids=str)
def test_gradients_and_training_equal_the_unsharded_model(
    shape: tuple[int, ...], names: str, dims: Any, layout: Any, after: Any
) -> None:
    mesh = mesh_of(names, *shape)
    model = sharded(mesh, dims, layout=layout, reshard_after_forward=after)
    dp = tuple(name for name in names.split() if name != "tp")
    found = train(model, *number_of(mesh, dp))
    assert all(isinstance(one, DTensor) for one in found)
    kinds = {seen[0] for block in model for seen in block.seen}
    assert kinds == {Tensor}, kinds
    assert distance(found, train(blocks())) <= 1e-12


@on_ranks(4)
@layouts
def test_forward_sees_plain_tensors_with_their_annotation(layout: Any) -> None:
    mesh = mesh_of()
    expected = blocks()
    annotate(expected, mesh, {mesh.get_group("dp"): spmd.R})
    names, first = [], []
    for name, param in expected[0].named_parameters():
        names.append(name)
        first.append((Tensor, dict(spmd.get_local_type(param)), spmd.get_partition_spec(param)))
    model = sharded(mesh, Dims(shard="dp"), layout=layout)
    train(model, *number_of(mesh, ("dp",)))
    for block in model:
        assert block.seen == first * 3
    model[0].unshard()
    shown = dict(model[0].named_parameters())
    assert {name: spmd.get_partition_spec(shown[name]) for name in names} == {
        name: seen[2] for name, seen in zip(names, first, strict=True)
    }
    model[0].reshard()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert not any(spmd.get_local_type(param) for param in model.parameters())


@on_ranks(4)
@layouts
@pytest.mark.parametrize(("omits_dp", "knows_mesh"), [(False, False), (True, False), (True, True)])
def test_types_are_checked_in_the_forward_but_not_in_the_engine(
    layout: Any, omits_dp: bool, knows_mesh: bool
) -> None:
    """``spmd_types`` checks the forward's operations, not the engine's.

    Annotations may leave out the data-parallel dims, with or without a current mesh.
    """
    from spmd_types.checker import typecheck

    mesh = mesh_of()

    class Checking:
        def __enter__(self) -> None:
            self._parts = [spmd.set_current_mesh(mesh), typecheck()]
            for part in self._parts:
                part.__enter__()

        def __exit__(self, *error: Any) -> None:
            for part in reversed(self._parts):
                part.__exit__(*error)

    with spmd.set_current_mesh(mesh) if knows_mesh else nullcontext():
        model = sharded(mesh, Dims(shard="dp"), layout=layout, omits_dp=omits_dp)
    assert distance(train(model, *number_of(mesh, ("dp",)), Checking), train(blocks())) <= 1e-12


@on_ranks(4)
@pytest.mark.skipif(TORCH < (2, 14), reason="PyTorch's FSDP2 takes annotated parameters since 2.14")
@pytest.mark.parametrize(
    ("shape", "names", "dims"),
    # PyTorch 2.15 wants "tp" as the last dim, with more than one rank.
    [one for one in SHAPES if not one[1].startswith("tp") and one[0][-1] > 1],
    ids=str,
)
def test_parameters_and_gradients_are_those_of_pytorchs_fsdp(
    shape: tuple[int, ...], names: str, dims: Any
) -> None:
    mesh = mesh_of(names, *shape)
    theirs, ours = sharded(mesh, dims, fsdp.fully_shard), sharded(mesh, dims)
    for (name, one), (same, other) in zip(
        theirs.named_parameters(), ours.named_parameters(), strict=True
    ):
        assert name == same and isinstance(other, DTensor)
        assert (type(one.data), one.shape, one.stride()) == (
            type(other.data),
            other.shape,
            other.stride(),
        )
        assert (one.device_mesh, one.placements) == (other.device_mesh, other.placements)
        assert spmd.get_local_type(one) == spmd.get_local_type(other)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    dp = tuple(name for name in names.split() if name != "tp")
    one, other = (train(model, *number_of(mesh, dp)) for model in (theirs, ours))
    assert distance(one, other) <= 1e-12
    for a, b in zip(theirs, ours, strict=True):
        assert [kind for kind, *_ in a.seen] == [kind for kind, *_ in b.seen]


@on_ranks(4)
@layouts
def test_state_dicts_are_saved_and_loaded(tmp_path: Path, layout: Any) -> None:
    mesh, dims = mesh_of(), Dims(shard="dp")
    trained = sharded(mesh, dims, layout=layout)
    train(trained, *number_of(mesh, ("dp",)))
    fullshard.checkpoint.save(tmp_path / "ours", trained, step=3)
    fresh = sharded(mesh, dims, layout=layout)
    fullshard.checkpoint.load(tmp_path / "ours", fresh)
    assert distance(list(fresh.parameters()), list(trained.parameters())) == 0
    full_state = fullshard.checkpoint.full_state_dict(trained)
    if dist.get_rank() == 0:
        assert {name: value.shape for name, value in full_state.items()} == {
            name: value.shape for name, value in blocks().state_dict().items()
        }
    if layout != PER_PARAM:
        return
    checkpoint.save({"model": trained.state_dict()}, checkpoint_id=tmp_path / "dcp")
    fresh = sharded(mesh, dims, layout=layout)
    state = fresh.state_dict()
    checkpoint.load({"model": state}, checkpoint_id=tmp_path / "dcp")
    fresh.load_state_dict(state)
    assert distance(list(fresh.parameters()), list(trained.parameters())) == 0
    plain = {"model": blocks().state_dict()}
    checkpoint.load(plain, checkpoint_id=tmp_path / "dcp")
    assert distance(list(plain["model"].values()), list(trained.parameters())) == 0


@on_ranks(4)
@layouts
def test_full_parameters_and_gradients_are_lent_with_annotations(layout: Any) -> None:
    mesh = mesh_of()
    model = sharded(mesh, Dims(shard="dp"), layout=layout)
    number, size = number_of(mesh, ("dp",))
    x = torch.linspace(-1, 1, BATCH * DIM, dtype=torch.float64).view(BATCH, DIM)
    model(x.chunk(size)[number]).square().mean().backward()
    before = full([param.grad for param in model.parameters()])
    with fullshard.unshard_params(model, with_grads=True, writeback=True):
        for param in model.parameters():
            assert type(param.data) is Tensor and param.grad is not None
            assert spmd.get_local_type(param)
            param.data.mul_(2)
            param.grad.mul_(2)
    assert distance(list(model.parameters()), [2 * p for p in blocks().parameters()]) == 0
    assert distance([p.grad for p in model.parameters()], [2 * one for one in before]) == 0


@on_ranks(4)
@layouts
def test_clipping_and_the_sharded_optimizer(layout: Any) -> None:
    mesh = mesh_of()
    model = sharded(mesh, Dims(shard="dp"), layout=layout)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    found = train(model, *number_of(mesh, ("dp",)), optimizer=optimizer, limit=0.5)
    assert distance(found, train(blocks(), limit=0.5)) <= 1e-12


@on_ranks(4)
@layouts
def test_a_placement_function_may_give_the_full_mesh(layout: Any) -> None:
    """A placement function may return PyTorch's mesh info with a full mesh, as in torchtitan."""
    mesh, dims = mesh_of(), Dims(shard="dp")
    model = blocks()
    annotate(model, mesh, {mesh.get_group("dp"): spmd.R})
    theirs = SimpleNamespace(mesh=mesh["dp"], shard_mesh_dim=0, spmd_mesh=mesh, dp_mesh_dims=dims)
    answer = fullshard.ShardPlacementResult(None, theirs)
    for block in model:
        fullshard.fully_shard(
            block, mesh=mesh_of("all", 4), shard_placement_fn=lambda _: answer, layout=layout
        )
    assert {param.device_mesh for param in model.parameters()} == {mesh}
    assert distance(train(model, *number_of(mesh, ("dp",))), train(blocks())) <= 1e-12


def refusals() -> dict[str, str]:
    mesh = mesh_of()
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    dims = Dims(shard="dp")

    def refused(types: Any, spec: Any = None, **options: Any) -> str:
        module = nn.Linear(4, 4, bias=False)
        if types is not None:
            spmd.assert_type(module.weight, types, spec)
        model = nn.Sequential(module)
        before = dict(model.named_parameters())
        with pytest.raises(errors.ConfigError) as caught:
            fullshard.fully_shard(model, **({"mesh": mesh, "dp_mesh_dims": dims} | options))
        assert type(model) is nn.Sequential and dict(model.named_parameters()) == before
        assert "fully_shard: parameter 0.weight: " in str(caught.value), caught.value
        return str(caught.value)

    cp = mesh_of("dp cp tp", 1, 2, 2)
    return {
        "no dp_mesh_dims": refused({dp: spmd.R, tp: spmd.S(0)}, mesh=mesh["dp"], dp_mesh_dims=None),
        "plain": refused(None),
        "outside": refused({dp: spmd.R, tp: spmd.R, spmd.MeshAxis.of(2, 4): spmd.R}),
        "all ranks": refused({dist.group.WORLD: spmd.R}),
        "no tp": refused({dp: spmd.R}),
        "cut over dp": refused({dp: spmd.S(0), tp: spmd.R}),
        "invariant over dp": refused({dp: spmd.I, tp: spmd.R}),
        "varying": refused({dp: spmd.R, tp: spmd.V}),
        "partial": refused({dp: spmd.R, tp: spmd.P}),
        "order": refused(
            {},
            spmd.PartitionSpec((cp.get_group("tp"), cp.get_group("cp")), None),
            mesh=cp,
        ),
    }


def test_annotations_that_do_not_fit_are_refused(pool: RankPool) -> None:
    told = pool.run(4, refusals)[0]
    expected = {
        "no dp_mesh_dims": "dp_mesh_dims is not given",
        "plain": "is a plain tensor",
        "outside": "is not among the dims of the mesh",
        "all ranks": "on mesh dim 'tp' it must be",
        "no tp": "on mesh dim 'tp' it must be",
        "cut over dp": "must be R",
        "invariant over dp": "must be R",
        "varying": "on mesh dim 'tp' it must be",
        "partial": "on mesh dim 'tp' it must be",
        "order": "order",
    }
    for case, word in expected.items():
        assert word in told[case], (case, told[case])
