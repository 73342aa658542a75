"""Tensors that a forward keeps instead of returning them: reads of freed parameters raise.

Without the error, a kernel reads freed memory and the process dies. The strict mode is off in these
jobs, because it would raise first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard
from fullshard._torch import memory as _memory
from fullshard.device import BufferKind
from fullshard.engine.unshard import FREED
from tests.kit.extensions import Halves
from tests.ranks.autograd import engine_of
from tests.ranks.pool import on_ranks
from tests.ranks.strict import left

DIM = 6
REFUSES = _memory.refuses_reads(torch.device("cpu"))
TEXT = (
    r"parameters of unit {}.*were read while the unit is resharded and its memory is freed"
    if REFUSES
    else f"is at version {FREED}; expected version"
)

refuses = pytest.mark.skipif(
    not REFUSES, reason="this PyTorch cannot refuse reads of memory: the process would die"
)
faces = pytest.mark.parametrize("face", ["dtensors", "ragged", "hooks", "flat", "flat in one"])


class Keeps(nn.Module):
    """A block that keeps a loss of a copy of its input, which is older than the block's output.

    The engine does not see the kept loss, so it frees the block's parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, dtype=torch.float64)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        start = x.detach().requires_grad_()
        self.kept = self.keep(start)
        return torch.tanh(self.linear(x))

    def keep(self, start: Tensor) -> Any:
        return (self.linear(start) * self.linear.bias).sum(), start


class KeepsLayer(Keeps):
    """A block that keeps its parameter, in a tuple: as an attribute it would be registered."""

    def keep(self, start: Tensor) -> Any:
        return (self.linear.weight,)


class KeepsView(Keeps):
    def keep(self, start: Tensor) -> Any:
        return (self.linear.weight.detach().t(),)


class ByHand(torch.autograd.Function):
    """A function that keeps its weight as an attribute, unseen by saved-tensor hooks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.weight.sum(), None


class KeepsFunction(Keeps):
    def keep(self, start: Tensor) -> Any:
        return ByHand.apply(start, self.linear.weight).sum(), start


def model_of(block: type[Keeps]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(3)))


def batch(number: int) -> Tensor:
    return torch.randn(2, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def shard(model: nn.Sequential, face: str, reshard: bool = True) -> nn.Module:
    if face.startswith("flat"):
        strategy = (
            fullshard.ShardingStrategy.FULL_SHARD
            if reshard
            else fullshard.ShardingStrategy.SHARD_GRAD_OP
        )
        options: Any = {"use_orig_params": face == "flat", "sharding_strategy": strategy}
        for index, block in enumerate(model):
            model[index] = fullshard.FullyShardedDataParallel(block, **options)
        return fullshard.FullyShardedDataParallel(model, **options)
    layout = fullshard.Ragged() if face == "ragged" else fullshard.PerParameter()
    for block in model:
        if face == "hooks":
            block.linear.weight = nn.Parameter(Halves(block.linear.weight.detach()))
        fullshard.fully_shard(block, layout=layout, reshard_after_forward=reshard)
    return fullshard.fully_shard(model, layout=layout, reshard_after_forward=reshard)


def blocks_of(model: nn.Module) -> list[Any]:
    return [one for one in model.modules() if hasattr(one, "keep") and hasattr(one, "linear")]


def held(model: nn.Module) -> int:
    return engine_of(model).meter.held_nbytes[BufferKind.UNSHARDED]


@contextmanager
def refused(unit: str = "") -> Iterator[None]:
    """Expect the error for a read of a unit's freed parameters in the block."""
    with pytest.raises(RuntimeError, match=TEXT.format(unit)):
        yield


def train(model: nn.Module, numbers: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in numbers:
        model(batch(number)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def goes_on_like(plain: nn.Module, model: nn.Module) -> None:
    for one in (plain, model):
        train(one, range(10, 12))
    assert held(model) == 0
    with torch.no_grad():
        torch.testing.assert_close(model(batch(0)), plain(batch(0)), rtol=1e-12, atol=1e-12)


@on_ranks(2)
@faces
def test_a_kept_graph_is_refused(face: str) -> None:
    """A kept graph is refused before the model's backward, after it, and after the step."""
    plain, model = model_of(Keeps), shard(model_of(Keeps), face)
    for one in (plain, model):
        train(one, range(2))
    with left():
        loss = model(batch(2)).sum()
        kept, start = blocks_of(model)[0].kept
        with refused():
            torch.autograd.grad(kept, start, retain_graph=True)
        loss.backward()
        with refused():
            torch.autograd.grad(kept, start, retain_graph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        with refused():
            kept.backward()
    optimizer.zero_grad()
    train(plain, range(2, 3))
    goes_on_like(plain, model)


@on_ranks(2)
@refuses
@faces
@pytest.mark.parametrize("block", [KeepsLayer, KeepsView])
def test_a_kept_parameter_and_its_views_are_refused(face: str, block: type[Keeps]) -> None:
    plain, model = model_of(block), shard(model_of(block), face)
    for one in (plain, model):
        train(one, range(2))
    (kept,) = blocks_of(model)[1].kept
    x = batch(0)
    uses: list[Callable[[], object]] = [
        lambda: kept.norm(),
        lambda: kept + 1,
        lambda: F.linear(x, kept),
        lambda: kept.clone(),
        lambda: kept.tolist(),
        lambda: repr(kept),
        lambda: kept.zero_(),
    ]
    with left():
        for use in uses:
            with torch.no_grad(), refused():
                use()
    assert kept.shape == (DIM, DIM) and kept.detach().t().shape == (DIM, DIM)
    goes_on_like(plain, model)


@on_ranks(2)
@refuses
@faces
def test_so_is_an_attribute_of_a_function(face: str) -> None:
    model = shard(model_of(KeepsFunction), face)
    with left():
        loss = model(batch(2)).sum()
        kept, start = blocks_of(model)[0].kept
        with refused():
            torch.autograd.grad(kept, start)
        loss.backward()


@on_ranks(2)
@refuses
def test_the_error_names_unit_and_parameters() -> None:
    model = shard(model_of(Keeps), "dtensors")
    with left():
        model(batch(0)).sum().backward()
        with refused(r"1 \(linear.weight, linear.bias; digest \w+\)"):
            torch.autograd.grad(*blocks_of(model)[1].kept)


@on_ranks(2)
def test_what_the_error_advises_works() -> None:
    """The remedies in the error's text give the unsharded model's gradient."""
    plain = model_of(Keeps)
    plain(batch(0)).sum().backward()
    (expected,) = torch.autograd.grad(*blocks_of(plain)[0].kept, retain_graph=True)

    def check(model: nn.Module) -> None:
        (grad,) = torch.autograd.grad(*blocks_of(model)[0].kept, retain_graph=True)
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)

    with left():
        model = shard(model_of(Keeps), "dtensors")
        loss = model(batch(0)).sum()
        with refused():
            check(model)
        model[0].unshard()  # type: ignore[index,union-attr,operator]
        check(model)
        loss.backward()
        model[0].reshard()  # type: ignore[index,union-attr,operator]
        for face in ("dtensors", "flat"):
            model = shard(model_of(Keeps), face, reshard=False)
            loss = model(batch(0)).sum()
            check(model)
            loss.backward()
            with refused():
                check(model)
        model = shard(model_of(Keeps), "dtensors")
        together = model(batch(0)).sum() + 0 * sum(one.kept[0] for one in blocks_of(model))
        together.backward()


@on_ranks(2)
def test_memory_that_is_not_freed_may_be_read() -> None:
    model = shard(model_of(Keeps), "dtensors")
    model.set_keep_unsharded_storage(True)  # type: ignore[operator,union-attr]
    with left():
        loss = model(batch(0)).sum()
        torch.autograd.grad(*blocks_of(model)[0].kept)
        loss.backward()
        train(model, range(2))
        model.set_keep_unsharded_storage(False)  # type: ignore[operator,union-attr]
        loss = model(batch(0)).sum()
        with refused():
            torch.autograd.grad(*blocks_of(model)[0].kept)
        loss.backward()


@on_ranks(2)
def test_profilers_see_nothing_of_it() -> None:
    """A profiler that reads the memory of all tensors does not fail on freed parameters."""
    model = shard(model_of(Keeps), "dtensors")
    with left():
        train(model, range(1))
        with torch.profiler.profile(record_shapes=True, profile_memory=True, with_stack=True):
            train(model, range(2))
