"""Mistakes of new users: one clear error on all ranks, and an unchanged model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.errors import FullshardError
from tests.ranks.models import fill, full_parameters, noise, shard_units
from tests.ranks.pool import on_ranks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Model(nn.Module):
    """A model with a method besides forward; with ``reads``, its forward reads a child's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 6)
        self.reads = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x @ self.head.weight.T if self.reads else self.head(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.head(x)


def make() -> Model:
    return fill(Model().double())


def shard(model: Any, *parts: nn.Module) -> Any:
    return shard_units(model, (*model.layers, *parts))


X = noise(2, 3, 6)


def optimizer_before() -> tuple[Any, Callable[[], object]]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    shard(model)
    model(X).sum().backward()
    return model, optimizer.step


def one_group_before() -> tuple[Any, Callable[[], object]]:
    """Return a step of an optimizer that stepped before it got a parameter from before sharding."""
    model = make()
    old = model.layers[1].inner.weight
    shard(model)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.0)
    optimizer.step()
    optimizer.add_param_group({"params": [old]})
    return model, optimizer.step


def parent_first() -> tuple[Any, Callable[[], object]]:
    model = fullshard.fully_shard(make())
    return model, lambda: fullshard.fully_shard(model.layers[0])


def plain_tensors(assign: bool = False) -> tuple[Any, Callable[[], object]]:
    model = shard(make())
    state = {name: torch.ones_like(full) for name, full in full_parameters(model).items()}
    return model, lambda: model.load_state_dict(state, assign=assign)


def another_method() -> tuple[Any, Callable[[], object]]:
    model = shard(make())
    return model, lambda: model.encode(X)


def a_parent_that_reads() -> tuple[Any, Callable[[], object]]:
    model = make()
    shard(model, model.head)
    model.reads = True
    return model, lambda: model(X)


def attention() -> tuple[Any, Callable[[], object]]:
    model = make()
    fullshard.fully_shard(model.attention.out_proj)
    return model, lambda: fullshard.fully_shard(model)


def no_forward() -> tuple[Any, Callable[[], object]]:
    model = make()
    return model, lambda: fullshard.fully_shard(model.layers)


def unknown_option() -> tuple[Any, Callable[[], object]]:
    model = make()
    return model, lambda: fullshard.fully_shard(model, reshard_after_forward="never")


CASES = {
    "an optimizer built before": (optimizer_before, "AdamW was built before fully_shard"),
    "a parameter from before": (one_group_before, "layers.1.inner.weight"),
    "the parent first": (parent_first, "children first"),
    "plain tensors": (plain_tensors, "StateDictOptions(full_state_dict=True)"),
    "plain tensors, assigned": (lambda: plain_tensors(True), "StateDictOptions"),
    "another method": (another_method, "register_fsdp_forward_method(module, 'encode')"),
    "a parent that reads": (a_parent_that_reads, "units inside of it: layers.0, layers.1, head"),
    "attention": (attention, "out_proj of MultiheadAttention"),
    "a list of modules": (no_forward, "ModuleList has no forward of its own"),
    "an unknown option": (unknown_option, "'never'"),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(1, 2)
def test_a_mistake_is_named_and_changes_nothing(case: str) -> None:
    model, act = CASES[case][0]()
    kinds = [type(module) for module in model.modules()]
    before = full_parameters(model)
    with pytest.raises(FullshardError) as caught:
        act()
    assert [type(module) for module in model.modules()] == kinds
    after = full_parameters(model)
    assert all(torch.equal(before[name], full) for name, full in after.items())
    text = str(caught.value)
    assert "\n" not in text
    if isinstance(model, fullshard.FSDPModule):  # the model can still train
        model.reads = False
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(X).sum().backward()
        optimizer.step()
    assert CASES[case][1] in text


@on_ranks(1)
def test_a_backend_for_other_devices_is_refused() -> None:
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    for mesh in (None, init_device_mesh("cpu", (1,))):
        model = make()
        with pytest.raises(FullshardError, match=r"is on cpu, its process group communicates on"):
            fullshard.fully_shard(model, mesh=mesh)
        assert type(model) is Model
    dist.destroy_process_group()


@on_ranks(2)
def test_an_optimizer_that_knows_both_is_not_refused() -> None:
    """An optimizer may have a parameter both sharded in a unit and plain outside of it."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    model[1].weight = model[0].weight
    fullshard.fully_shard(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
