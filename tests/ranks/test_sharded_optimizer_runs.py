"""ShardedOptimizer steps on few tensors, for any placement of parameters and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard import fully_shard
from fullshard.optim import ShardedOptimizer
from fullshard.tensors import flat_part_of, local_part
from tests.kit.sharded_optimizer import (
    LAYOUTS,
    Make,
    backward,
    both_layouts,
    difference,
    same_state,
    sharded,
)
from tests.ranks.models import noise
from tests.ranks.pool import RankPool, on_ranks

# The number of tensors


class Many(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(num_layers)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def many(layout: str, num_layers: int) -> nn.Module:
    model = Many(num_layers)
    for number, param in enumerate(model.parameters()):
        param.data.copy_(noise(*param.shape, seed=number))
    fully_shard(model.layers[0], **LAYOUTS[layout])
    return fully_shard(model, **LAYOUTS[layout])


def with_gradients(model: nn.Module, number: int = 0) -> None:
    for param in model.parameters():
        param.grad = None
    model(noise(2, 4, seed=number).float()).sum().backward()


@both_layouts
@on_ranks(1, 2, 3)
def test_one_run_for_each_unit(layout: str) -> None:
    model = many(layout, 5)
    params = list(model.parameters())
    parts = [flat_part_of(local_part(param)) for param in params]
    flats = {id(part.flat) for part in parts if part is not None}  # units with elements here
    expected = len(flats) + (None in parts)  # parameters without elements here step together
    optimizer = ShardedOptimizer(params, AdamW)
    assert optimizer.num_runs == 0
    for number in range(3):
        with_gradients(model, number)
        optimizer.step()
        assert optimizer.num_runs == expected
    params[4].grad = None  # a parameter in the middle of the second unit
    optimizer.step()
    cut = None not in parts[3:6]
    assert optimizer.num_runs == expected + cut
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.step()
    assert optimizer.num_runs == expected + cut  # the new parameter has no gradient yet


class Wide(nn.Module):
    """A model whose gradients are too large for the engine to keep between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4000), nn.Linear(4000, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def counts_runs_of(model: nn.Module, num_backwards: int) -> int:
    optimizer = ShardedOptimizer(model.parameters(), AdamW)
    for number in range(3):
        optimizer.zero_grad()
        for _ in range(num_backwards):
            model(noise(2, 4, seed=number).float()).sum().backward()
        optimizer.step()
    return optimizer.num_runs


@on_ranks(2)
@both_layouts
def test_large_gradients_and_those_that_added_up_are_neighbours_too(layout: str) -> None:
    assert counts_runs_of(fully_shard(Wide(), **LAYOUTS[layout]), 1) <= 2
    assert counts_runs_of(many(layout, 5), 2) <= 3


class Calls(TorchDispatchMode):
    """A mode that counts operations, and checks that none is on a DTensor."""

    num = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        assert not any(issubclass(kind, DTensor) for kind in types), func
        self.num += 1
        return func(*args, **(kwargs or {}))


def count_calls(layout: str, num_layers: int, holds_gradients: bool) -> list[int]:
    model = many(layout, num_layers)
    optimizer = ShardedOptimizer(model.parameters(), AdamW, foreach=False)
    found, held = [], []
    for number in range(4):
        with_gradients(model, number)
        if holds_gradients:
            held.append([param.grad for param in model.parameters()])  # keeps their memory in use
        with Calls() as calls:
            optimizer.step()
        found.append(calls.num)
    return found[1:]


@both_layouts
@pytest.mark.parametrize("holds_gradients", [False, True])
def test_a_step_costs_as_much_for_many_parameters_as_for_few(
    pool: RankPool, layout: str, holds_gradients: bool
) -> None:
    few = pool.run(2, count_calls, layout, 3, holds_gradients)
    many = pool.run(2, count_calls, layout, 30, holds_gradients)
    assert max(map(max, many)) <= max(map(max, few)) < 80


# Memory


def aliases(model: nn.Module) -> list[int]:
    """Return the number of tensors that share each buffer of parameters."""
    places = [flat_part_of(local_part(param)) for param in model.parameters()]
    storages = [place.flat.untyped_storage() for place in places if place is not None]
    return [torch._C._storage_Use_Count(storage._cdata) for storage in storages]


@on_ranks(2)
@both_layouts
def test_between_steps_it_holds_no_parameters_and_no_gradients(layout: str) -> None:
    model = many(layout, 3)
    optimizer = ShardedOptimizer(model.parameters(), AdamW)
    with_gradients(model)
    before = aliases(model)
    addresses = [local_part(p.grad).data_ptr() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    assert aliases(model) == before
    for number in range(3):
        optimizer.zero_grad()
        with_gradients(model, number)
        optimizer.step()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert [local_part(grad).data_ptr() for grad in grads] == addresses
        del grads


@on_ranks(2)
@both_layouts
def test_follows_parameters_that_moved(layout: str) -> None:
    """The optimizer follows parameters that get another dtype or new memory, as in ``.to()``."""

    def script(model: Any, make_optimizer: Make) -> nn.Module:
        optimizer = make_optimizer(model.parameters())
        for number in range(6):
            if number == 2:
                model.float()
            if number == 4:
                model.back.weight.data = model.back.weight.data.clone()
            backward(model, number)
            optimizer.step()
        return model

    kwargs = {"lr": 0.1, "momentum": 0.9, "foreach": False}
    mine = script(sharded(layout), lambda params: ShardedOptimizer(params, SGD, **kwargs))
    its = script(sharded(layout), lambda params: SGD(params, **kwargs))
    assert difference(mine, its) == 0.0


# Parameters outside of units


def others() -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = [distribute_tensor(noise(5, 3, seed=seed), mesh, [Shard(seed % 2)]) for seed in range(2)]
    turned = DTensor.from_local(noise(2, 3, seed=4).t(), mesh, [Shard(0)], run_check=False)
    whole = distribute_tensor(noise(4, seed=5), mesh, [Replicate()])
    one_row = distribute_tensor(noise(1, 3, seed=7), mesh, [Shard(0)])
    plain = [noise(2, 3, seed=6), torch.tensor(0.5, dtype=torch.float64), noise(3, 2, seed=8).t()]
    return [nn.Parameter(tensor) for tensor in (*cut, turned, whole, one_row, *plain)]


def put_gradients(params: list[nn.Parameter], step: int) -> None:
    for number, param in enumerate(params):
        grad: Any = torch.empty_like(param).fill_(0.1 * number + step)
        if isinstance(param, DTensor) and isinstance(param.placements[0], Replicate):
            part = noise(4, seed=dist.get_rank() + step)
            grad = DTensor.from_local(part, param.device_mesh, [Partial()])
        param.grad = grad


@on_ranks(2)
def test_steps_on_any_tensor() -> None:
    mine, its = others(), others()
    optimizer, expected = ShardedOptimizer(mine, AdamW), AdamW(its)
    for step in range(4):
        for params, one in ((mine, optimizer), (its, expected)):
            put_gradients(params, step)
            one.step()
    same_state(optimizer.state_dict(), expected.state_dict())
    assert optimizer.num_runs == len(mine)
    for a, b in zip(mine, its, strict=True):
        assert torch.equal(local_part(a), local_part(b))


@on_ranks(1, process_group=False)
def test_steps_on_sparse_gradients() -> None:
    models = [nn.Embedding(5, 3, sparse=True) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    mine = ShardedOptimizer(models[0].parameters(), SGD, lr=0.1)
    its = SGD(models[1].parameters(), lr=0.1)
    for _ in range(3):
        for model, optimizer in zip(models, (mine, its), strict=True):
            optimizer.zero_grad()
            model(torch.tensor([1, 3])).sum().backward()
            optimizer.step()
    assert difference(*models) == 0.0


@on_ranks(2)
def test_waits_for_gradients() -> None:
    """The optimizer waits for gradients with an unfinished collective, as in tensor parallelism."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mine, its = (nn.Parameter(distribute_tensor(noise(4, 2), mesh, [Replicate()])) for _ in "ab")
    optimizer, expected = ShardedOptimizer([mine], AdamW), AdamW([its])
    for step in range(3):
        for param in (mine, its):
            summed = all_reduce(noise(4, 2, seed=step), "sum", mesh)
            grad = DTensor.from_local(summed, mesh, [Replicate()], run_check=False)
            assert isinstance(local_part(grad), AsyncCollectiveTensor)
            param.grad = grad
        optimizer.step()
        expected.step()
    assert torch.equal(local_part(mine), local_part(its))


# Groups


@on_ranks(2)
@both_layouts
def test_groups_may_change(layout: str) -> None:
    """Parameters may move between groups, and groups may be added and removed."""

    def script(model: Any, make_optimizer: Make) -> nn.Module:
        params = list(model.parameters())
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.5}, {"params": []}]
        optimizer = make_optimizer(groups)
        for number in range(8):
            if number == 2:  # keeps the order of parameters
                moved = optimizer.param_groups[1]["params"].pop(0)
                optimizer.param_groups[0]["params"].append(moved)
            if number == 3:
                optimizer.param_groups.pop()
            if number == 4:
                optimizer.param_groups[1]["params"] = optimizer.param_groups[1]["params"][::-1]
            if number == 5:
                optimizer.param_groups.pop(0)
            if number == 7:
                optimizer.zero_grad()
            else:
                backward(model, number)
            optimizer.step()
        return model

    kwargs = {"lr": 0.1, "foreach": False}
    mine = script(sharded(layout), lambda groups: ShardedOptimizer(groups, AdamW, **kwargs))
    its = script(sharded(layout), lambda groups: AdamW(groups, **kwargs))
    assert difference(mine, its) == 0.0
