"""Memory that is kept for graphs that no hook sees: how long, and without effect on other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard.device import BufferKind
from fullshard.frontend.ownership import unit_of
from tests.ranks.autograd import engine_of
from tests.ranks.models import shard_units
from tests.ranks.pool import RankPool, every_world, on_ranks

DIM = 6


class Logs(nn.Module):
    """A block that logs the norm of its output on some ranks, and may keep a second output."""

    def __init__(self, ranks: tuple[int, ...], keeps: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, dtype=torch.float64)
        self.ranks, self.keeps = ranks, keeps
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if dist.get_rank() in self.ranks:
            y.norm().item()
        if self.keeps:
            self.kept = self.linear(y.detach().requires_grad_())
        return y


def model_of(ranks: tuple[int, ...], **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Logs(ranks, **options) for _ in range(3)))


def batch(number: int) -> Tensor:
    return torch.randn(2, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def held(model: nn.Module) -> int:
    """Return the bytes of unsharded memory, without the root's, which may borrow its shard."""
    return engine_of(model).meter.held_nbytes[BufferKind.UNSHARDED]


def shard(model: nn.Module, face: str, reshard: bool | int | None) -> nn.Module:
    if face == "flat":
        for index, block in enumerate(model):  # type: ignore[arg-type]
            model[index] = fullshard.FullyShardedDataParallel(block)  # type: ignore[index]
        return fullshard.FullyShardedDataParallel(model)
    layout = fullshard.Ragged() if face == "ragged" else fullshard.PerParameter()
    shard_units(model, model, layout=layout, reshard_after_forward=reshard)
    return model


def accumulates(face: str, reshard: bool | int | None, ranks: tuple[int, ...]) -> None:
    """Check two steps of three microbatches against the unsharded model."""
    plain, model = model_of(()), shard(model_of(ranks), face, reshard)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    for step in range(2):
        for number in range(3):
            for one in (plain, model):
                one(batch(10 * step + number)).sum().backward()
            assert held(model) == 0
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(model(batch(0)), plain(batch(0)), rtol=1e-12, atol=1e-12)


@every_world
@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2, 3)], ids=["one rank", "all"])
@pytest.mark.parametrize("face", ["dtensors", "ragged", "flat"])
def test_a_logged_norm_is_no_matter_to_other_ranks(
    pool: RankPool, world: int, face: str, ranks: tuple[int, ...]
) -> None:
    pool.run(world, accumulates, face, True, ranks)


@pytest.mark.parametrize("reshard", [None, False, 2])
def test_nor_is_it_with_other_policies(pool: RankPool, reshard: bool | int | None) -> None:
    pool.run(4, accumulates, "dtensors", reshard, (1,))


@on_ranks(2)
def test_memory_is_kept_for_as_long_as_a_graph_may_read_it() -> None:
    model = shard(model_of((), keeps=True), "dtensors", True)
    model(batch(0)).sum().backward()
    assert held(model) > 0  # the kept tensors may be backpropagated
    sum(block.kept.sum() for block in model).backward()  # type: ignore[operator]
    assert held(model) == 0
    model(batch(0)).sum().backward()
    full = held(model)
    for block in model:  # type: ignore[attr-defined]
        block.keeps, block.kept = False, None
    assert held(model) == full > 0
    model(batch(0)).sum().backward()
    assert held(model) == 0


class Saves(torch.autograd.Function):
    """A function that keeps its weight as an attribute, so that no saved tensor refers to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        return grad @ ctx.weight, grad.t() @ grad


class SavesByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.kept = Saves.apply(x, self.linear.weight)
        return y


@on_ranks(2)
def test_attributes_of_a_function_count_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(SavesByHand(), SavesByHand())
    shard_units(model, model, reshard_after_forward=True)
    model(batch(0)).sum().backward()
    unit = unit_of(model[1])
    assert unit is not None and unit.is_read()
    kept = model[1].kept
    x = torch.autograd.grad(kept.sum(), [model[1].linear.weight], allow_unused=True)
    assert x == (None,)  # the graph has the unsharded weight
    del kept, model[1].kept, model[0].kept
    model(batch(0)).sum().backward()


@on_ranks(2)
def test_a_backward_that_keeps_its_graph() -> None:
    model = shard(model_of(()), "dtensors", True)
    x = batch(0).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), [x], create_graph=True)
    assert held(model) > 0
    grad.pow(2).sum().backward()
    assert held(model) == 0
