"""A counter in a group advances once per step, in however many runs the class steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard.optim import OwnedOptimizer, ShardedOptimizer
from tests.pure.buffers import neighbours, parameters


class Averaged(Optimizer):
    """Corrects a mean by the number of steps, as Adam does."""

    def count(self, group: dict[str, Any]) -> float:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            count = self.count(group)
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    mean.lerp_(param.grad, 0.1)
                    param.add_(mean, alpha=-0.1 / (1 - 0.9**count))


class Lazy(Averaged):
    """Creates its counter in the first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def count(self, group: dict[str, Any]) -> float:
        group["step"] = group.get("step", 0) + 1
        return float(group["step"])


class InPlace(Averaged):
    """Counts in a tensor, as classes do that support CUDA graphs."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"step": torch.zeros(())})

    def count(self, group: dict[str, Any]) -> float:
        group["step"] += 1
        return float(group["step"])


WAYS: dict[str, Callable[[list[nn.Parameter], type[Optimizer]], Optimizer]] = {
    "plain": ShardedOptimizer,
    "turns": lambda params, cls: ShardedOptimizer(params, cls, host_fraction=0.5),
    "one round": OwnedOptimizer,
    "rounds": lambda params, cls: OwnedOptimizer(params, cls, round_nbytes=1),
    "one by one": lambda params, cls: OwnedOptimizer([{"params": params, "seed": 3}], cls),
}


@pytest.mark.parametrize("cls", [Lazy, InPlace])
@pytest.mark.parametrize("way", WAYS)
def test_a_counter_counts_steps(way: str, cls: Callable[[list[Tensor]], Optimizer]) -> None:
    buffers = [neighbours(seed) for seed in range(4)]
    mine = [param for tensors in buffers for param in parameters(tensors)]
    its = [nn.Parameter(param.detach().clone()) for param in mine]
    optimizer, expected = WAYS[way](mine, cls), cls(its)
    for step in range(3):
        for number, (param, other) in enumerate(zip(mine, its, strict=True)):
            grad = torch.full_like(param, 0.1 * (number + 1) * (step + 1))
            param.grad, other.grad = grad, grad.clone()
        optimizer.step()
        expected.step()
    assert float(optimizer.param_groups[0]["step"]) == 3
    for param, other in zip(mine, its, strict=True):
        assert torch.equal(param, other)


class OfGroup(Averaged):
    """Counts in groups that have gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def count(self, group: dict[str, Any]) -> float:
        if any(param.grad is not None for param in group["params"]):
            group["step"] = group.get("step", 0)
            group["step"] += 1
        return float(group.get("step", 1))


@pytest.mark.parametrize("way", ["plain", "rounds"])
@pytest.mark.parametrize("in_place", [False, True])
def test_groups_of_different_rounds_count_each(way: str, in_place: bool) -> None:
    """Each round begins with the options from before the step."""

    def groups(params: list[nn.Parameter]) -> Any:
        counter = {"step": torch.zeros(())} if in_place else {}
        return [{"params": [one], **{k: v.clone() for k, v in counter.items()}} for one in params]

    mine = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3, 3))]
    its = [nn.Parameter(param.detach().clone()) for param in mine]
    optimizer, expected = WAYS[way](groups(mine), OfGroup), OfGroup(groups(its))
    for _ in range(3):
        for param in (*mine, *its):
            param.grad = torch.ones_like(param)
        optimizer.step()
        expected.step()
    assert [float(group["step"]) for group in optimizer.param_groups] == [3, 3]
    assert all(torch.equal(param, other) for param, other in zip(mine, its, strict=True))
