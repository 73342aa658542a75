"""PyTorch's optimizers step DTensors by their local tensors, also in lists of mixed kinds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fullshard import Ragged, fully_shard
from tests.kit.sharded_optimizer import FUSED, OPTIMIZERS
from tests.ranks.models import noise
from tests.ranks.net import apart, make, shard, step
from tests.ranks.pool import RankPool, on_ranks

WAYS: dict[str, dict[str, Any]] = {
    "one by one": {"foreach": False},
    "lists": {"foreach": True},
    "fused": {"fused": True},
}
CASES = [(kind, way) for way in WAYS for kind in (FUSED if way == "fused" else OPTIMIZERS)]


def steps_like_unsharded(kind: str, how: dict[str, Any]) -> float:
    cls, options = OPTIMIZERS[kind]
    plain: Any = make()
    model: Any = shard(copy.deepcopy(plain))
    for one in (plain, model):
        optimizer = cls(one.parameters(), **{**options, **how})
        for number in range(4):
            step(one, optimizer, number)
    for param in model.parameters():
        assert all(
            isinstance(value, DTensor) and value.placements == param.placements
            for value in optimizer.state[param].values()
            if isinstance(value, Tensor) and value.dim()
        )
    return apart(model, plain)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("kind", "way"), CASES)
def test_steps_like_the_unsharded_model(pool: RankPool, world: int, kind: str, way: str) -> None:
    """Steps equal the unsharded model's; PyTorch refuses fused SGD and Adagrad for DTensors."""
    assert max(pool.run(world, steps_like_unsharded, kind, WAYS[way])) <= 1e-14


class Mixed(nn.Module):
    """A model for parameters on two meshes, and one that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 5)
        self.expert = nn.Linear(5, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(torch.tanh(self.dense(x))) * self.gain


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed().double()


LAYOUTS: dict[str, dict[str, Any]] = {"per parameter": {}, "ragged": {"layout": Ragged()}}


@on_ranks(2)
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize(("kind", "way"), [case for case in CASES if case[1] != "one by one"])
def test_lists_may_mix_meshes_and_plain_tensors(kind: str, way: str, layout: str) -> None:
    """Lists may mix DTensors of two meshes and layouts with plain tensors.

    PyTorch refuses such lists, which its optimizers build by default on a GPU.
    """
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    cls, options = OPTIMIZERS[kind]
    plain: Any = mixed()
    model: Any = copy.deepcopy(plain)
    fully_shard(model.expert, mesh=mesh)
    fully_shard(model, mesh=mesh["shard"], ignored_params={model.gain}, **LAYOUTS[layout])
    assert len({p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}) == 2
    for one in (plain, model):
        optimizer = cls(one.parameters(), **{**options, **WAYS[way]})
        for number in range(4):
            one(noise(4, 6, seed=number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert apart(model, plain) <= 1e-14


@on_ranks(2, 3)
def test_what_is_placed_otherwise_is_left_to_pytorch(world: int) -> None:
    """Operands with other placements, and with pending sums, get PyTorch's results."""
    model: Any = shard(make())
    weight = model.head.weight
    mesh, rank, world = weight.device_mesh, weight.device_mesh.get_rank(), weight.device_mesh.size()
    whole = weight.full_tensor().detach()
    with torch.no_grad():
        replicated = DTensor.from_local(noise(5, 7), mesh, [Replicate()])
        torch._foreach_add_([weight], [replicated])
        assert torch.equal(weight.full_tensor(), whole + noise(5, 7))
        weight.add_(replicated, alpha=-1)
        assert torch.allclose(weight.full_tensor(), whole)
        half = weight / 2
        assert isinstance(half, DTensor) and half.placements == (Shard(0),)
        assert torch.equal(half.full_tensor(), weight.full_tensor() / 2)
        summed = DTensor.from_local(torch.full((3,), rank + 1.0), mesh, [Partial()])
        total = world * (world + 1) / 2
        assert torch.equal((summed / 2).full_tensor(), torch.full((3,), total / 2))
        assert torch.equal((summed + 1).full_tensor(), torch.full((3,), total + 1))
        (more,) = torch._foreach_add([summed], 1.0)
        assert torch.equal(more.full_tensor(), torch.full((3,), total + 1))


@on_ranks(2)
def test_changes_are_seen() -> None:
    """In-place operations increase the version of a DTensor."""
    weight: Any = shard(make()).head.weight
    for change in (lambda: weight.mul_(2), lambda: weight.add_(1), lambda: weight.div_(2)):
        before = weight._version
        with torch.no_grad():
            change()
        assert weight._version > before
