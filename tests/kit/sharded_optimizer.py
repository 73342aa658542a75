"""Optimizers, and training of a sharded model with each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from fullshard import Ragged
from fullshard.optim import ShardedOptimizer, clip_grad_norm_
from fullshard.tensors import local_part
from tests.kit.parity import make, vocab
from tests.ranks.models import ids, noise, shard_units
from tests.versions import TORCH


class Adagrad(torch.optim.Adagrad):
    """An Adagrad that makes state for parameters of later groups, which PyTorch 2.11 forgets."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for param in param_group["params"] if TORCH < (2, 13) else ():
            start = param_group["initial_accumulator_value"]
            sums = torch.full_like(param, start, memory_format=torch.preserve_format)
            self.state[param] = {"step": torch.tensor(0.0), "sum": sums}


LAYOUTS: dict[str, dict[str, Any]] = {"per_parameter": {}, "ragged": {"layout": Ragged()}}


# Factors of additions are powers of two. On some processors PyTorch rounds a multiplication and an
# addition once, but not at the end of a tensor, and joined parameters end elsewhere.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.125}),
    "momentum": (SGD, {"lr": 0.125, "momentum": 0.9, "weight_decay": 0.125}),
    "nesterov": (SGD, {"lr": 0.125, "momentum": 0.5, "nesterov": True, "maximize": True}),
    "adam": (Adam, {"lr": 0.01, "weight_decay": 0.125}),
    "adamw": (AdamW, {"lr": 0.01}),
    "amsgrad": (AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adagrad": (Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "nadam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": (torch.optim.RAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "asgd": (torch.optim.ASGD, {"t0": 2}),
    "rprop": (torch.optim.Rprop, {}),
}


FUSED = ["sgd", "momentum", "nesterov", "adam", "adamw", "amsgrad", "adagrad"]


both_layouts = pytest.mark.parametrize("layout", list(LAYOUTS))


Make = Callable[..., Optimizer]


def sharded(layout: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return a model with tied, frozen, unused and one-row parameters; some shards are empty."""
    model = make("odd", dtype)
    shard_units(model, (model.first, model.back), **LAYOUTS[layout])
    return model


def backward(model: nn.Module, number: int = 0) -> None:
    """Replace the gradients by those of a new batch."""
    for param in model.parameters():
        param.grad = None
    tokens = ids(4, 7, vocab=vocab("odd"), seed=number)
    model(tokens).square().mean().backward()


def difference(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    gaps = [(local_part(a) - local_part(b)).abs().detach() for a, b in pairs]
    return max((gap.max().item() for gap in gaps if gap.numel()), default=0.0)


def train(model: Any, make_optimizer: Make) -> Optimizer:
    """Train nine steps with new groups, frozen parameters, and absent and moved gradients."""
    late = [model.first.bias, model.gain]
    others = [param for param in model.parameters() if all(param is not one for one in late)]
    groups = [
        {"params": [param for param in others if param.dim() > 1], "weight_decay": 0.0625},
        {"params": [param for param in others if param.dim() == 1], "lr": 0.03125},
    ]
    optimizer = make_optimizer(groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for number in range(9):
        if number == 2:
            optimizer.add_param_group({"params": late, "weight_decay": 0.015625})
        for at, requires_grad in ((3, False), (6, True)):
            if number == at:
                model.back.requires_grad_(requires_grad)
        backward(model, number)
        if number in (4, 5):
            model.one_row.weight.grad = None
        if number == 7:
            model.embed.weight.grad = model.embed.weight.grad.clone()  # has other memory
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
    return optimizer


def on_locals(base: type[Optimizer]) -> type[Optimizer]:
    """Return ``base`` for local tensors, for steps that torch cannot do on DTensors."""

    class OnLocals(base):  # type: ignore[misc,valid-type]
        def add_param_group(self, group: dict[str, Any]) -> None:
            self.locals = getattr(self, "locals", {})
            for param in group["params"]:
                self.locals[param] = nn.Parameter(local_part(param).detach())
            super().add_param_group({**group, "params": [self.locals[p] for p in group["params"]]})

        def step(self, closure: Any = None) -> Any:
            for param, local in self.locals.items():
                local.grad = None if param.grad is None else local_part(param.grad)
            return super().step(closure)

    return OnLocals


def trains(layout: str, kind: str, dtype: torch.dtype, how: dict[str, Any]) -> float:
    cls, kwargs = OPTIMIZERS[kind]
    model, other = sharded(layout, dtype), sharded(layout, dtype)
    mine = train(model, lambda params: ShardedOptimizer(params, cls, **kwargs, **how))
    assert isinstance(mine, Optimizer)
    by_torch = kind != "rprop" and "fused" not in how
    reference = cls if by_torch else on_locals(cls)
    its = train(other, lambda params: reference(params, **kwargs, **how))
    for group, expected in zip(mine.param_groups, its.param_groups, strict=True):
        assert {**group, "params": 0} == {**expected, "params": 0}
    if by_torch:
        same_state(mine.state_dict(), its.state_dict())
    return difference(model, other)


def same_state(state: Any, expected: Any) -> None:
    """Check that keys, their order, values and placements are equal."""
    assert list(state["state"]) == list(expected["state"])
    for key, values in expected["state"].items():
        assert list(state["state"][key]) == list(values)
        for name, value in values.items():
            got = state["state"][key][name]
            assert type(got) is type(value)
            assert (got.shape, got.dtype, got.device) == (value.shape, value.dtype, value.device)
            if isinstance(value, DTensor):
                assert got.placements == value.placements
            assert torch.equal(local_part(got), local_part(value)), name


def built_on_meta(layout: str, kind: str) -> None:
    cls, kwargs = OPTIMIZERS[kind]

    def script(make_optimizer: Make, early: bool) -> nn.Module:
        with torch.device("meta"):
            model = sharded(layout)
        optimizer = make_optimizer(model.parameters()) if early else None
        model.to_empty(device="cpu")
        for seed, param in enumerate(model.parameters()):
            local_part(param).detach().copy_(noise(*local_part(param).shape, seed=seed))
        optimizer = optimizer or make_optimizer(model.parameters())
        for number in range(3):
            backward(model, number)
            optimizer.step()
        return model

    mine = script(lambda params: ShardedOptimizer(params, cls, **kwargs), early=True)
    its = script(lambda params: cls(params, **kwargs), early=False)
    assert difference(mine, its) == 0


def accumulates(layout: str) -> None:
    models = [sharded(layout), sharded(layout)]
    optimizers = [ShardedOptimizer(models[0].parameters(), AdamW), AdamW(models[1].parameters())]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, step)
            model(ids(4, 7, vocab=vocab("odd"), seed=9)).sum().backward()
            optimizer.step()
    assert difference(*models) == 0
