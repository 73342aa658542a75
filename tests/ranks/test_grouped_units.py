"""Units of several modules, moved and cast through the modules around them or one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import (
    FullyShardedDataParallel,
    PerParameter,
    Ragged,
    ShardingStrategy,
    errors,
    fully_shard,
    unshard_params,
)
from fullshard.comm.mesh import wrapped
from tests.ranks.models import fill, noise, refusal
from tests.ranks.net import apart
from tests.ranks.pool import RankPool, on_ranks
from tests.recording import CollectiveCall, Recording

LAYOUTS: dict[str, Any] = {"per_parameter": PerParameter(), "ragged": Ragged()}
ROUNDING = 1e-6  # the first steps are in fp32
ROOTS = {"sharded": True, "plain": False}


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.LayerNorm(6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(torch.tanh(self.norm(self.first(x)))))


def grouped(model: nn.Module, layout: str, root: bool) -> nn.Module:
    """Shard ``norm`` and ``head`` as one unit, as torchtitan does."""
    options = {"layout": LAYOUTS[layout]}
    fully_shard([model.norm, model.head], **options)
    return fully_shard(model, **options) if root else model


def train(model: nn.Module, number: int) -> None:
    dtype = next(model.parameters()).dtype
    model(noise(4, 5, seed=number, dtype=dtype)).square().mean().backward()
    with torch.no_grad():
        for param in model.parameters():
            assert param.grad is not None
            param.sub_(param.grad, alpha=0.1)
            param.grad = None


def one_by_one(model: nn.Module) -> None:
    for module in (model.first, model.norm, model.middle, model.head):
        module.double()


def not_recursively(model: nn.Module) -> None:
    for module in model.modules():
        module._apply(lambda tensor: tensor.double(), recurse=False)


def after_a_failure(model: nn.Module) -> None:
    """Cast a model after a first cast that failed in the middle."""
    calls = 0

    def cast(tensor: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        return tensor.double()

    with pytest.raises(MemoryError):
        model._apply(cast)
    model.double()


def with_future(name: str) -> Callable[[nn.Module], None]:
    def cast(model: nn.Module) -> None:
        switch = getattr(torch.__future__, f"set_{name}_module_params_on_conversion")
        switch(True)
        try:
            model.double()
        finally:
            switch(False)

    return cast


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "whole": lambda model: model.double(),
    "one_by_one": one_by_one,
    "not_recursively": not_recursively,
    "after_a_failure": after_a_failure,
    "swapped": with_future("swap"),
    "overwritten": with_future("overwrite"),
}


def cast_in_every_way(layout: str, root: bool) -> dict[str, float]:
    found = {}
    for name, cast in MOVES.items():
        for steps_before in (0, 1):
            plain = fill(Stack())
            model = grouped(copy.deepcopy(plain), layout, root)
            for one in (plain, model):
                for number in range(steps_before):
                    train(one, number)
                (cast if one is model else MOVES["whole"])(one)
                for number in (2, 3):
                    train(one, number)
                assert {param.dtype for param in one.parameters()} == {torch.float64}
            found[f"{name} after {steps_before}"] = apart(model, plain)
    return found


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_members_of_one_unit_are_cast_in_any_way(pool: RankPool, layout: str, root: str) -> None:
    for found in pool.run(2, cast_in_every_way, layout, ROOTS[root]):
        assert max(found.values()) <= ROUNDING, found


def materialised(layout: str, root: bool) -> list[float]:
    found = []
    plain = fill(Stack())
    for recurse in (True, False):
        with torch.device("meta"):
            model = grouped(Stack(), layout, root)
        for module in [model] if recurse else model.modules():
            module.to_empty(device="cpu", recurse=recurse)
        fill(model)
        expected = copy.deepcopy(plain)
        for one in (expected, model):
            train(one, 0)
        found.append(apart(model, expected))
    return found


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_members_of_one_unit_leave_meta_together(pool: RankPool, layout: str, root: str) -> None:
    for found in pool.run(2, materialised, layout, ROOTS[root]):
        assert max(found) <= ROUNDING, found


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_unit_that_was_cast_partly_is_refused_until_all_of_it_was(layout: str) -> None:
    """A unit that was cast in part refuses forwards until the whole unit is cast."""
    plain = fill(Stack())
    model = grouped(copy.deepcopy(plain), layout, root=True)
    model.norm.double()
    said = [refusal(errors.ConfigError, model, noise(4, 5)) for _ in range(2)]
    model.double()
    plain.double()
    for one in (plain, model):
        train(one, 0)
    difference = apart(model, plain)
    for message in said:
        assert "weight torch.float64 cpu" in message
        assert "weight torch.float32 cpu" in message
        assert "whole sharded module" in message
    assert difference <= ROUNDING


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])
def test_wrappers_are_cast_in_any_way(use_orig_params: bool) -> None:
    found = {}
    for name in ("whole", "not_recursively", "after_a_failure"):
        plain = fill(Stack())
        model = copy.deepcopy(plain)
        options: dict[str, Any] = {"use_orig_params": use_orig_params, "device_id": "cpu"}
        model.head = FullyShardedDataParallel(model.head, **options)
        model = FullyShardedDataParallel(model, **options)
        MOVES[name](model)
        plain.double()
        results = []
        for one in (plain, model):
            one(noise(4, 5, seed=1)).square().mean().backward()
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            results.append(one(noise(4, 5, seed=2)))
        found[name] = (results[0] - results[1]).abs().max().item()
    assert max(found.values()) <= ROUNDING, found


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", ["cast", "tied", "loaded"])
def test_a_change_may_be_noticed_in_inference_mode(change: str, layout: str) -> None:
    """A change of the model may first be noticed in inference mode."""
    models = []
    for sharded in (False, True):
        model: Any = fill(Stack())
        if sharded:
            grouped(model, layout, root=True)
        if change == "cast":
            one_by_one(model)
        model.double()
        if change == "tied":
            model.norm.bias = model.norm.weight
        if change == "loaded":
            model.load_state_dict({n: v * 2 for n, v in model.state_dict().items()}, assign=True)
        with torch.inference_mode():
            model(noise(4, 5, seed=0))
        for number in (1, 2):
            train(model, number)
        models.append(model)
    assert apart(models[1], models[0]) < ROUNDING


class Few(nn.Module):
    """A parameter of two elements; the last of three ranks holds none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def few(face: str, calls: list[CollectiveCall]) -> Any:
    """Shard ``Few`` so that unsharded parameters stay until the optimizer has stepped."""
    model = nn.Sequential(Few())
    with wrapped(lambda comm: Recording(comm, calls)):
        if face == "modules":
            return fully_shard(model, reshard_after_forward=False, layout=Ragged())
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            use_orig_params=face == "originals",
        )


def change_and_accumulate(face: str, change: str) -> tuple[int, float]:
    """Return the gathers of two forwards after a change, and the distance of the gradients."""
    calls: list[CollectiveCall] = []
    model, plain = few(face, calls), nn.Sequential(Few())
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        one(noise(4, 2, seed=0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if change == "cast":  # one by one, so that only the next forward notices
            for inner in one.modules():
                if not isinstance(inner, FullyShardedDataParallel):
                    inner.float()
                    inner.double()
        else:
            for param in one.parameters():
                param.data = param.data.clone()
    calls.clear()
    if face == "modules":
        model.set_requires_gradient_sync(False)
    with nullcontext() if face == "modules" else model.no_sync():
        model(noise(4, 2, seed=1)).sum().backward()
    if face == "modules":
        model.set_requires_gradient_sync(True)
    model(noise(4, 2, seed=2)).sum().backward()
    num_gathers = [call.kind for call in calls].count("all_gather")
    for seed in (1, 2):
        plain(noise(4, 2, seed=seed)).sum().backward()
    with unshard_params(model, with_grads=True, writeback=False):
        have, expected = (next(one.parameters()).grad for one in (model, plain))
        assert have is not None and expected is not None
        return num_gathers, (have - expected).abs().max().item()


@pytest.mark.parametrize("change", ["cast", "data"])
@pytest.mark.parametrize("face", ["modules", "originals", "flat"])
def test_ranks_that_hold_nothing_notice_a_change(pool: RankPool, face: str, change: str) -> None:
    found = pool.run(3, change_and_accumulate, face, change)
    assert {gathers for gathers, _ in found} == {2 if face == "modules" else 1}
    assert max(off for _, off in found) < ROUNDING
