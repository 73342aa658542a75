"""Checkpoints on disk: every layout to every layout, on any number of ranks, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard import FullyShardedDataParallel, Ragged, checkpoint
from fullshard.checkpoint.loading.read import Reader
from tests.ranks.models import noise, shard_units
from tests.ranks.pool import RankPool


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(192, 320)
        self.down = nn.Linear(320, 192)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Weights of several blocks, one element, buffers, parameters that never step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(192, dtype=torch.float64)
        self.spare = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def plain(seed: int) -> Any:
    torch.manual_seed(seed)
    return Net().double()


def units(model: Any, **options: Any) -> Any:
    return shard_units(model, model.blocks, **options)


def flat(model: Any, **options: Any) -> Any:
    for at, block in enumerate(model.blocks):
        model.blocks[at] = FullyShardedDataParallel(block, **options)
    model.spare = FullyShardedDataParallel(
        model.spare, **options
    )  # no state: a flat one has it all
    return FullyShardedDataParallel(model, **options)


def tensor_parallel(model: Any, **options: Any) -> Any:
    world = dist.get_world_size()
    shape = (world // 2, 2) if world % 2 == 0 else (world, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    return units(model, mesh=mesh["dp"], **options)


def replicated(model: Any, **options: Any) -> Any:
    world = dist.get_world_size()
    shape = (2, world // 2) if world % 2 == 0 else (world, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return units(model, mesh=mesh, **options)


WAYS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "rows": units,
    "ragged": lambda model: units(model, layout=Ragged()),
    "hsdp": replicated,
    "tp": tensor_parallel,
    "ragged tp": lambda model: tensor_parallel(model, layout=Ragged()),
    "flat": lambda model: flat(model, use_orig_params=True),
    "one flat": lambda model: flat(model, use_orig_params=False),
}


def built(way: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    model = WAYS[way](plain(seed))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def everything(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = checkpoint.full_state_dict(model, rank0_only=False)
    kept = checkpoint.full_optim_state_dict(model, optimizer, rank0_only=False)
    return {
        **state,
        **{f"{name}/{key}": v for name, own in kept["state"].items() for key, v in own.items()},
        "groups": kept["param_groups"],
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, Tensor):
            assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
            assert torch.equal(value, other[name]), name
        elif name != "groups":
            assert value == other[name], name
    return True


def saves(way: str, path: Path) -> None:
    """Train and save; rank 0 also keeps the whole state, as PyTorch saves it."""
    model, optimizer = built(way, 1)
    for number in range(2):
        model(noise(4, 192, seed=number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(path, model, optimizer, {"rates": (1, 0.5)}, step=2)
    whole = everything(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(whole, path.with_suffix(".pt"))


def loads(way: str, paths: list[Path]) -> list[float]:
    """Load each of ``paths`` into a model; return the bytes read for each byte kept."""
    ratios = []
    with pytest.MonkeyPatch.context() as patch:
        read = Reader.read

        def counted(reader: Reader, *args: Any) -> None:
            read(reader, *args)
            kept = sum(wanted.memory.nbytes for wanted in reader._wanted.values())
            ratios.append(reader.nbytes_read / kept)

        patch.setattr(Reader, "read", counted)
        for path in paths:
            model, optimizer = built(way, 2)
            assert checkpoint.load(path, model, optimizer) == {"rates": (1, 0.5)}
            assert same(everything(model, optimizer), torch.load(path.with_suffix(".pt"))), path
    return ratios


WORLDS = (1, 2, 3, 4)
ALL = list(itertools.product(WORLDS, WAYS))


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A checkpoint of each way on each number of ranks."""
    folder = tmp_path_factory.mktemp("saved")
    for world, way in ALL:
        pool.run(world, saves, way, folder / f"{way}-{world}")
    return [folder / f"{way}-{world}" for world, way in ALL]


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.more)])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("world", WORLDS)
def test_every_way_is_loaded_by_every_other(
    pool: RankPool, saved: list[Path], world: int, way: str, every: int
) -> None:
    first = ALL.index((world, way)) % every
    for ratios in pool.run(world, loads, way, saved[first::every]):
        assert max(ratios) <= 1.05
