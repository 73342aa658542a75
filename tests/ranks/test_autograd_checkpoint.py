"""Activation checkpoints at all places, and backwards that are not training steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import fullshard
from tests.ranks.autograd import DIM, Block, Case, Tower, compare, loss_of, worlds_and_policies
from tests.ranks.pool import RankPool

Run = Callable[..., Any]  # ``checkpoint`` with its options


class AroundUnits(Tower):
    run: Run

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


class AroundSeveralUnits(AroundUnits):
    """One checkpoint around two units: both run again before the first backward."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        return self.head(self.run(lambda y: third(second(y)), first(x)))


class AroundAUnitUsedTwice(AroundUnits):
    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        x = self.run(lambda y: second(first(y)), first(x))
        return self.head(self.run(lambda y: first(third(y)), x))


class Nested(AroundUnits):
    """Checkpoints of single units inside one checkpoint around all units."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.inner, x * torch.ones_like(x, requires_grad=True)))

    def inner(self, x: Tensor) -> Tensor:
        x = self.run(self.blocks[0], x)
        x = self.run(lambda y: self.run(self.blocks[1], y), x)
        return self.blocks[2](x)


class PartOfABlock(Block):
    """A block with a checkpoint in its forward; parameters are used inside and outside of it."""

    run: Run

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = self.run(lambda z: self.down(torch.tanh(z)), y)
        return x + self.down(torch.tanh(self.up(y)))


class PartlyTower(AroundUnits):
    def __init__(self) -> None:
        super().__init__(PartOfABlock(), Block(), PartOfABlock())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class PartlyAndAround(PartlyTower):
    forward = AroundUnits.forward


class AroundTheHead(AroundUnits):
    """Parameters of the root are used in a checkpoint at the start and in one at the end."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(lambda y: torch.tanh(self.head(y)) @ self.head.weight, x)
        for block in self.blocks:
            x = block(x)
        return self.run(lambda y: self.head(self.blocks[0](y)), x)


PLACES = [
    AroundUnits,
    AroundSeveralUnits,
    AroundAUnitUsedTwice,
    Nested,
    PartlyTower,
    PartlyAndAround,
    AroundTheHead,
]


class Checkpoints(Case):
    """A case whose attributes the test sets."""

    place: type[AroundUnits]
    reentrant: bool
    early_stop = True
    input_grad = True
    whole = False

    def model(self) -> nn.Module:
        model = type(self).place()
        for module in model.modules():
            if isinstance(module, (AroundUnits, PartOfABlock)):
                module.run = self.run
        return model

    def run(self, function: Any, x: Tensor) -> Any:
        return checkpoint(function, x, use_reentrant=type(self).reentrant)

    def step(self, model: Any, x: Tensor, number: int) -> None:
        x = x.clone().requires_grad_(type(self).input_grad)
        with ExitStack() as stack:
            if not type(self).reentrant:
                stack.enter_context(set_checkpoint_early_stop(type(self).early_stop))
            y = self.run(model, x) if type(self).whole else model(x)
            loss_of(y).backward()

    def good(self, model: Any, x: Tensor) -> None:
        self.step(model, x, 0)


def compare_checkpoints(reshard: bool | None, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        # PyTorch warns of a nested reentrant checkpoint: in its first pass, no input needs a
        # gradient.
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        compare(type("Checkpoints", (Checkpoints,), options), reshard)


WAYS: dict[str, dict[str, Any]] = {
    "reentrant": {"reentrant": True},
    "non_reentrant": {"reentrant": False},
    "to_the_end": {"reentrant": False, "early_stop": False},
    "without_input_gradient": {"reentrant": False, "input_grad": False},
    "whole_model_too": {"reentrant": False, "whole": True},
    "whole_model_too_reentrant": {"reentrant": True, "whole": True},
}


@worlds_and_policies
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_checkpoints_change_no_gradient(
    pool: RankPool, place: type[AroundUnits], way: str, world: int, reshard: bool | None
) -> None:
    pool.run(world, compare_checkpoints, reshard, {"place": place, **WAYS[way]}, timeout_s=20.0)


class GradientsOfInputsOnly(Case):
    """``autograd.grad`` runs twice, then the training step's backward on the same graph."""

    def step(self, model: Any, x: Tensor, number: int) -> None:
        leaf = x.clone().requires_grad_()
        inner = leaf * 1
        loss = loss_of(model(inner))
        torch.autograd.grad(loss, inner, retain_graph=True)
        torch.autograd.grad(loss, [leaf, inner], retain_graph=True)
        if number:
            loss.backward()


class BackwardIntoInputsOnly(Case):
    def step(self, model: Any, x: Tensor, number: int) -> None:
        leaf = x.clone().requires_grad_()
        loss = loss_of(model(leaf))
        loss.backward(inputs=[leaf], retain_graph=True)
        assert leaf.grad is not None
        if number:
            loss.backward()


class WithoutGradientsFirst(Case):
    """The model's first forward builds no graph."""

    num_steps = 3
    mode: Any = torch.no_grad

    def step(self, model: Any, x: Tensor, number: int) -> None:
        with type(self).mode():
            before = model(x)
        loss = loss_of(model(x))
        with type(self).mode():
            between = model(x)
            assert torch.equal(before, between)
        loss.backward()


class InferenceFirst(WithoutGradientsFirst):
    mode = torch.inference_mode


class ABlockWithoutGradientsFirst(WithoutGradientsFirst):
    """A block runs alone under inference mode before the first forward of the root."""

    def step(self, model: Any, x: Tensor, number: int) -> None:
        with torch.inference_mode():
            model.blocks[0](x)
        super().step(model, x, number)


class EvaluationBetweenSteps(Case):
    num_steps = 4

    def model(self) -> nn.Module:
        return Tower(Block(), NormBlock(), Block())

    def step(self, model: Any, x: Tensor, number: int) -> None:
        model.eval()
        loss_of(model(x))
        model.train()
        loss_of(model(x)).backward()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()


class NormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class UnshardedByHand(Case):
    """``unshard`` before the forward, ``reshard`` between forward and backward."""

    num_steps = 3

    def step(self, model: Any, x: Tensor, number: int) -> None:
        if isinstance(model, fullshard.FSDPModule):
            model.unshard(async_op=number == 0)
            model.blocks[1].unshard()
        loss = loss_of(model(x))
        if isinstance(model, fullshard.FSDPModule):
            model.reshard()
            model.blocks[2].reshard()
        loss.backward()


MODES = [
    GradientsOfInputsOnly,
    BackwardIntoInputsOnly,
    WithoutGradientsFirst,
    InferenceFirst,
    ABlockWithoutGradientsFirst,
    EvaluationBetweenSteps,
    UnshardedByHand,
]


@worlds_and_policies
@pytest.mark.parametrize("kind", MODES, ids=lambda kind: kind.__name__)
def test_what_is_no_training_step_disturbs_none(
    pool: RankPool, kind: type[Case], world: int, reshard: bool | None
) -> None:
    pool.run(world, compare, kind, reshard, timeout_s=20.0)
