"""Parameters that are already DTensors: tensor parallelism inside data parallelism."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import fullshard
from fullshard import errors
from fullshard.frontend.ownership import unit_of
from tests.kit.tensor_parallel import LENGTH, STEPS, VOCAB, Block, Net, parallelize, shard
from tests.ranks.models import fill, full_parameters, ids
from tests.ranks.pool import RankPool, on_ranks

PER_PARAM, RAGGED = fullshard.PerParameter(), fullshard.Ragged()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def sharded_adamw(params: Any) -> torch.optim.Optimizer:
    return fullshard.optim.ShardedOptimizer(params, torch.optim.AdamW, lr=1e-2)


def train(
    model: nn.Module,
    part: int,
    num_parts: int,
    *,
    accumulate: int = 1,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
) -> list[Tensor]:
    """Train on a part of each batch; return gradients, norms, state and parameters.

    Gradients are those of the first step, and state and parameters those of the end, as full
    tensors.
    """
    optimizer = make_optimizer(model.parameters())
    norms = []
    grads: list[Tensor] = []
    for step in range(STEPS):
        for micro in range(accumulate):
            if isinstance(model, fullshard.FSDPModule):
                model.set_requires_gradient_sync(micro == accumulate - 1)
            whole = ids(4, LENGTH, vocab=VOCAB, seed=10 * step + micro)
            tokens = whole.chunk(num_parts)[part]
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
            (loss / accumulate).backward()
        if step == 0:
            grads = [whole_of(p.grad) for p in model.parameters() if p.grad is not None]
        norms.append(fullshard.optim.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    states = [
        whole_of(optimizer.state[param][key])
        for param in model.parameters()
        if param in optimizer.state
        for key in ("exp_avg", "exp_avg_sq")
    ]
    return [*grads, *norms, *states, *full_parameters(model).values()]


def whole_of(tensor: Any) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.clone()


def compare(
    shape: tuple[int, ...],
    sizes: dict[str, Any],
    *,
    accumulate: int = 1,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    **options: Any,
) -> float:
    """Return the largest difference to the unsharded model; the last mesh dim is ``tp``."""
    reference = fill(Net(**sizes).double())
    expected = train(reference, 0, 1, accumulate=accumulate)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "dp", "tp")[-len(shape) :])
    model = fill(Net(**sizes).double())
    parallelize(model, mesh["tp"])
    data = mesh[mesh.mesh_dim_names[:-1]]
    shard(model, fullshard.fully_shard, mesh=data, **options)
    num_parts = data.size()
    part = dist.get_rank() // mesh["tp"].size()
    found = train(model, part, num_parts, accumulate=accumulate, make_optimizer=make_optimizer)
    assert len(found) == len(expected)
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


both_layouts = pytest.mark.parametrize("layout", [PER_PARAM, RAGGED], ids=repr)
UNEVEN = {"dim": 5, "hidden": 7}
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "uneven": ((2, 2), UNEVEN, {}),
    "tied": ((2, 2), {"tied": True}, {}),
    "sharded optimizer": ((2, 2), {}, {"make_optimizer": sharded_adamw}),
    "accumulating": ((2, 2), {}, {"accumulate": 2, "reshard_after_forward": True}),
    "accumulating, kept": ((2, 2), {}, {"accumulate": 2, "reshard_after_forward": False}),
    "replicas": ((2, 1, 2), {}, {}),
}


@both_layouts
@pytest.mark.parametrize("case", CASES)
def test_equals_the_unsharded_model(pool: RankPool, case: str, layout: Any) -> None:
    shape, sizes, options = CASES[case]
    assert max(pool.run(4, compare, shape, sizes, layout=layout, **options)) <= 1e-12


@both_layouts
def test_secondary_shards_of_tensor_parallel_parameters(pool: RankPool, layout: Any) -> None:
    """``reshard_after_forward=<int>`` works with tensor parallelism; PyTorch fails in forward."""
    results = pool.run(4, compare, (4, 1), {}, layout=layout, reshard_after_forward=2)
    assert max(results) <= 1e-12


@on_ranks(4)
@both_layouts
def test_units_with_local_outputs_are_resharded(layout: Any) -> None:
    """Units are resharded after forward and backward, also with outputs that are local tensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = fill(Net())
    parallelize(model, mesh["tp"])
    for block in model.blocks:
        fullshard.fully_shard(block.down, mesh=mesh["dp"], layout=layout)  # output is local
    shard(model, fullshard.fully_shard, mesh=mesh["dp"], layout=layout)
    unit = unit_of(model)
    assert unit is not None and unit.engine is not None
    meter = unit.engine.meter
    found = []
    for _ in range(2):
        out = model(ids(2, LENGTH, vocab=VOCAB))
        states = unit.engine.scheduler.residents.units
        found.append(any(state.is_held for key, state in states.items() if key != unit.key))
        out.sum().backward()
        found.append(meter.held_nbytes.total() > 0)
    assert found == [False] * 4


@on_ranks(4, timeout_s=180)
@pytest.mark.parametrize("late", [False, True])
def test_compiled_tensor_parallel_blocks_train_alike(late: bool) -> None:
    """Compiled blocks train as others; PyTorch 2.13 cannot compile sequence parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for compiling in (False, True):
        model = fill(Net().double())
        for block in model.blocks:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        if compiling and not late:
            model.blocks[0].compile(backend="aot_eager")
        shard(model, fullshard.fully_shard, mesh=mesh["dp"])
        if compiling and late:
            model.blocks[0].compile(backend="aot_eager")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The .grad attribute")  # Dynamo reads it
            found.append(train(model, mesh["dp"].get_local_rank(), 2))
    assert max((a - b).abs().max().item() for a, b in zip(*found, strict=True)) <= 1e-12


@on_ranks(4)
def test_a_whole_state_dict_is_loaded_into_uneven_parameters() -> None:
    """A full state dict loads into parameters of uneven sizes; PyTorch fails an assertion here."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net(**UNEVEN)
    parallelize(model, mesh["tp"])
    shard(model, fullshard.fully_shard, mesh=mesh["dp"])
    whole = fill(Net(**UNEVEN)).state_dict()
    set_model_state_dict(model, dict(whole), options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(value, whole[key]) for key, value in full_parameters(model).items())


@on_ranks(4)
def test_the_mesh_of_the_parameters_is_not_one_to_shard_over() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    messages = []
    for given in (mesh, mesh["tp"]):
        model = Net()
        parallelize(model, mesh["tp"])
        before = dict(model.named_parameters())
        with pytest.raises(errors.ConfigError) as caught:
            fullshard.fully_shard(model, mesh=given)
        assert dict(model.named_parameters()) == before
        messages.append(str(caught.value))
    model = Net()
    partial = DTensor.from_local(torch.ones(3, 3), mesh["tp"], [Partial()])
    model.gain = nn.Parameter(partial)
    with pytest.raises(errors.UnsupportedError, match=r"gain.*Partial"):
        fullshard.fully_shard(model, mesh=mesh["dp"])
    assert all("embed.weight" in m and "dp_mesh_dims" in m for m in messages)


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    """Yield a pool of eight processes, for tests that need eight ranks."""
    with RankPool() as ranks:
        yield ranks


@both_layouts
def test_replicas_and_shards_of_tensor_parallel_parameters(eight: RankPool, layout: Any) -> None:
    assert max(eight.run(8, compare, (2, 2, 2), {}, layout=layout, timeout_s=120)) <= 1e-12


def checkpointed(folder: str, shape: tuple[int, int], sizes: dict[str, Any]) -> bool:
    """Save from a mesh, load into an unsharded model, and compare."""
    model = fill(Net(**sizes))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    parallelize(model, mesh["tp"])
    shard(model, fullshard.fully_shard, mesh=mesh["dp"])
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)
    whole = Net(**sizes)
    checkpoint.load({"model": whole.state_dict()}, checkpoint_id=folder)
    expected = fill(Net(**sizes)).state_dict()
    return all(torch.equal(value, expected[key]) for key, value in whole.state_dict().items())


def test_checkpoints_of_uneven_parameters_on_eight_ranks(eight: RankPool, tmp_path: Path) -> None:
    """Checkpoints of uneven parameters have the right offsets; PyTorch would save wrong ones."""
    shape, sizes = (4, 2), {"dim": 5, "hidden": 9}
    assert all(eight.run(8, checkpointed, str(tmp_path), shape, sizes, timeout_s=120))
    assert max(eight.run(8, compare, shape, sizes, timeout_s=120)) <= 1e-12


# Parameters on a mesh that includes the data-parallel dims


def place_on(mesh: DeviceMesh) -> Callable[[str, nn.Module, DeviceMesh], None]:
    """Return a partition function that shards linear layers over the tensor-parallel dim."""

    def partition(name: str, module: nn.Module, _: DeviceMesh) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            placements: list[Any] = [Replicate()] * mesh.ndim
            if name.endswith("up") or (name.endswith("down") and key == "weight"):
                placements[mesh.mesh_dim_names.index("tp")] = Shard(int(name.endswith("down")))
            whole = distribute_tensor(param.detach(), mesh, placements)
            setattr(module, key, nn.Parameter(whole, requires_grad=param.requires_grad))

    return partition


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6, 10) for _ in range(2))
        self.blocks[0].norm.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train_mlp(model: nn.Module, mesh: DeviceMesh | None, dp: tuple[str, ...]) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6).roll(step, 0)
        if mesh is not None:
            number = dp_number(mesh, dp)
            size = mesh[dp].size()
            x = distribute_tensor(
                x.chunk(size)[number], mesh, [Replicate()] * mesh.ndim, src_data_rank=None
            )
        out = model(x).square().mean()
        (out.full_tensor() if isinstance(out, DTensor) else out).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(full_parameters(model).values())


def dp_number(mesh: DeviceMesh, dp: tuple[str, ...]) -> int:
    """Return this rank's index among the data-parallel ranks."""
    number = 0
    for name in dp:
        number = number * mesh[name].size() + mesh[name].get_local_rank()
    return number


DIMS = fullshard.DataParallelMeshDims


@on_ranks(4)
@both_layouts
@pytest.mark.parametrize(
    ("shape", "names", "dims"),
    [
        ((2, 2), ("dp", "tp"), DIMS(shard="dp")),
        ((2, 2), ("dp", "tp"), DIMS(replicate="dp")),
        ((2, 2), ("tp", "dp"), DIMS(shard="dp")),
        ((2, 1, 2), ("dp", "cp", "tp"), DIMS(shard=("dp", "cp"))),
        ((2, 1, 2), ("rep", "dp", "tp"), DIMS(shard="dp", replicate="rep")),
        ((1, 2, 2), ("rep", "dp", "tp"), DIMS(shard="dp", replicate="rep")),
    ],
    ids=str,
)
def test_parameters_on_a_full_mesh(
    shape: tuple[int, ...], names: tuple[str, ...], dims: Any, layout: Any
) -> None:
    torch.manual_seed(0)
    reference = Mlp().double()
    model = Mlp().double()
    model.load_state_dict(reference.state_dict())
    dp = tuple(name for name in names if name != "tp")
    expected = train_mlp(reference, None, dp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    distribute_module(model, mesh, place_on(mesh))
    for block in model.blocks:
        fullshard.fully_shard(
            block,
            mesh=init_device_mesh("cpu", shape, mesh_dim_names=names),  # equal, but another object
            dp_mesh_dims=dims,
            layout=layout,
            reshard_after_forward=None,
        )
    found = train_mlp(model, mesh, dp)
    found = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    assert found <= 1e-12
