"""Models and optimizers to save, and comparisons after a load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard import FullyShardedDataParallel, Ragged, checkpoint
from fullshard.optim import ShardedOptimizer
from tests.kit.unshard_params import loss_of
from tests.ranks.models import noise, shard_units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(192, 320)
        self.down = nn.Linear(320, 192)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Weights in blocks, parameters of one element, buffers, and parameters that never step."""

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
    )  # a flat parameter has state for all or none
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


def stepped(model: Any, optimizer: Any, steps: int = 2) -> None:
    for number in range(steps):
        model(noise(4, 192, seed=number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def saves(way: str, path: Path) -> None:
    """Train and save; rank 0 also saves the full state with torch.save."""
    model, optimizer = built(way, 1)
    stepped(model, optimizer)
    checkpoint.save(path, model, optimizer, {"rates": (1, 0.5)}, step=2)
    whole = everything(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(whole, path.with_suffix(".pt"))


def alone(seed: int = 0, hidden: int = 96) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(5, 64)).sum().backward()
    optimizer.step()
    return model, optimizer


def trained(model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    for _ in range(steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sharded_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
