"""``OwnedOptimizer`` refuses a state dict as a whole, or loads it as the plain class would."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adafactor, Adam, Optimizer

from fullshard import checkpoint
from fullshard.errors import ConfigError
from fullshard.optim import Muon, OwnedOptimizer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 6, bias=False), nn.Linear(5, 3, bias=False)
        for number, param in enumerate(self.parameters()):
            param.data = torch.linspace(-1, 1 + number, param.numel()).view_as(param)


def give(params: Any, number: int) -> None:
    for at, param in enumerate(params):
        param.grad = torch.linspace(-1, 1 + at + number, param.numel()).view_as(param)


def everything(model: nn.Module, optimizer: Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_a_state_dict_that_is_refused_changes_nothing() -> None:
    model = Net()
    optimizer = OwnedOptimizer(model.parameters(), Adafactor, lr=0.1)
    give(model.parameters(), 0)
    optimizer.step()
    before = everything(model, optimizer)
    odd = copy.deepcopy(optimizer.state_dict())
    odd["param_groups"][0]["lr"] = 7.0
    odd["state"][1] = {"left.0": torch.ones(4, 4)}
    with pytest.raises(ConfigError, match=r"state \['left.0'\] of a parameter of shape \(3, 5\)"):
        optimizer.load_state_dict(odd)
    assert same(everything(model, optimizer), before)
    twin = copy.deepcopy(optimizer)
    optimizer.state[model.other.weight] = {"left.0": torch.ones(4, 4)}
    give(model.parameters(), 1)
    with pytest.raises(ConfigError, match=r"left\.0"):
        optimizer.step()
    assert same(model.state_dict(), before[0])
    twin.load_state_dict(before[1])


class Left(Optimizer):
    """Keeps a square matrix with as many rows as the tensor, as Shampoo does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    rows = param.shape[0]
                    left = self.state[param].setdefault("left", torch.zeros(rows, rows))
                    left.add_(param.grad @ param.grad.T)
                    param.sub_(group["lr"] * param.grad / (1 + left.trace()))


def test_a_checkpoint_whose_state_is_refused_changes_neither_model_nor_optimizer(
    tmp_path: Path,
) -> None:
    def built(blocks: Any) -> tuple[nn.Module, OwnedOptimizer]:
        model = Net()
        return model, OwnedOptimizer(model.named_parameters(), Left, blocks=blocks)

    model, optimizer = built(lambda name, shape: (shape[0] - 2, 2) if shape[0] == 6 else None)
    give(model.parameters(), 0)
    optimizer.step()
    checkpoint.save(tmp_path / "one", model, optimizer, step=1)
    model, optimizer = built(None)
    before = everything(model, optimizer)
    with pytest.raises(ConfigError, match=r"'left\.0', 'left\.1'"):
        checkpoint.load(tmp_path / "one", model, optimizer)
    assert same(everything(model, optimizer), before)


def test_muon_loads_all_or_none() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    optimizer = Muon(model, lr=0.1)
    give(model.parameters(), 0)
    optimizer.step()
    before = everything(model, optimizer)
    odd = copy.deepcopy(optimizer.state_dict())
    for group in odd["param_groups"]:
        group["lr"] = 7.0
    for number in next(g["params"] for g in odd["param_groups"] if g["algorithm"] == "muon"):
        odd["state"][number] = {"left.0": torch.ones(4, 4)}
    with pytest.raises(ConfigError, match=r"left\.0"):
        optimizer.load_state_dict(odd)
    assert same(everything(model, optimizer), before)


@pytest.mark.parametrize("blocks", [None, 2, lambda name, shape: (1, shape[0] - 1)])
def test_numbers_of_older_versions_become_tensors(blocks: Any) -> None:
    models = [Net(), Net()]
    both: list[Optimizer] = [
        Adam(models[0].parameters(), lr=0.1),
        OwnedOptimizer(models[1].named_parameters(), Adam, lr=0.1, blocks=blocks),
    ]
    for number in range(3):
        for model, optimizer in zip(models, both, strict=True):
            give(model.parameters(), number)
            optimizer.step()
            if number == 1:
                # A state dict of the plain class: an owned parameter has a step count per block.
                state = copy.deepcopy(both[0].state_dict())
                for own in state["state"].values():
                    own["step"] = 2.0
                optimizer.load_state_dict(state)
    assert same(models[0].state_dict(), models[1].state_dict())


class Failing(Adafactor):
    """Fails in its first step."""

    has_failed = True

    def step(self, closure: Any = None) -> Any:
        if not Failing.has_failed and any(
            p.grad is not None for p in self.param_groups[0]["params"]
        ):
            Failing.has_failed = True
            raise MemoryError("no memory for state")
        return super().step(closure)


@pytest.mark.parametrize("round_nbytes", [1, 1 << 20])
def test_a_first_step_that_fails_is_not_the_last(round_nbytes: int) -> None:
    model, plain = Net(), Net()
    optimizer = OwnedOptimizer(model.parameters(), Failing, lr=0.1, round_nbytes=round_nbytes)
    expected = Adafactor(plain.parameters(), lr=0.1)
    give(model.parameters(), 0)
    Failing.has_failed = False
    with pytest.raises(MemoryError):
        optimizer.step()
    assert same(model.state_dict(), plain.state_dict())
    for number in range(2):
        give(model.parameters(), number)
        optimizer.step()
        give(plain.parameters(), number)
        expected.step()
    assert same(model.state_dict(), plain.state_dict())
    assert set(optimizer.state[model.one.weight]) == set(expected.state[plain.one.weight])


@pytest.mark.parametrize("blocks", [None, 256])
def test_parameters_of_integers_are_accepted(blocks: int | None) -> None:
    """They never have gradients; quantized models have such parameters."""
    model = nn.Linear(4, 4)
    model.codes = nn.Parameter(torch.zeros(400, dtype=torch.uint8), requires_grad=False)
    optimizer = OwnedOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, blocks=blocks)
    before = model.weight.detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before) and not model.codes.any()
