"""Graphs of many shapes between inputs, outputs and losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks.autograd import (
    DIM,
    Block,
    Case,
    Tower,
    compare,
    engine_of,
    loss_of,
    worlds_and_policies,
)
from tests.ranks.pool import RankPool


class AUnitIsUsedInALoop(Case):
    def model(self) -> nn.Module:
        block = Block()
        return Tower(block, Block(), block, block)

    def units(self, model: Any) -> list[Any]:
        return [model.blocks[0], model.blocks[1], model]


class SeveralForwardsBeforeOneBackward(Case):
    def step(self, model: Any, x: Tensor, number: int) -> None:
        (loss_of(model(x)) + loss_of(model(2 * x)) + loss_of(model(x - 1))).backward()


class SeveralBackwardsInTheOrderOfForwards(Case):
    def step(self, model: Any, x: Tensor, number: int) -> None:
        for loss in [loss_of(model(x)), loss_of(model(2 * x)), loss_of(model(x - 1))]:
            loss.backward()


class SeveralBackwardsInTheOtherOrder(Case):
    def step(self, model: Any, x: Tensor, number: int) -> None:
        for loss in [loss_of(model(x)), loss_of(model(2 * x)), loss_of(model(x - 1))][::-1]:
            loss.backward()


class AGraphIsRetainedTwice(Case):
    def step(self, model: Any, x: Tensor, number: int) -> None:
        loss = loss_of(model(x))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()


class TwoHeads(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.second = Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return self.head(x), self.second(x)


class TwoLossesShareATrunk(Case):
    def model(self) -> nn.Module:
        return TwoHeads()

    def units(self, model: Any) -> list[Any]:
        return [*model.blocks, model.second, model]

    def step(self, model: Any, x: Tensor, number: int) -> None:
        one, two = map(loss_of, model(x))
        one.backward(retain_graph=True)
        two.backward()

    def good(self, model: Any, x: Tensor) -> None:
        one, two = map(loss_of, model(x))
        (one + two).backward()


class ALossIgnoresOneOutput(TwoLossesShareATrunk):
    def step(self, model: Any, x: Tensor, number: int) -> None:
        loss_of(model(x)[number % 2]).backward()


class OnlyOnePartOfAnOutputIsUsedAtATime(Case):
    def step(self, model: Any, x: Tensor, number: int) -> None:
        one, two = model(x).split([2, 3], dim=-1)
        loss_of(two).backward(retain_graph=True)
        loss_of(one).backward()


class InPlaceOnItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).add_(self.down(torch.tanh(self.up(x.clone()))))


class AUnitChangesItsInputInPlace(Case):
    def model(self) -> nn.Module:
        return Tower(Block(), InPlaceOnItsInput(), InPlaceOnItsInput())

    def step(self, model: Any, x: Tensor, number: int) -> None:
        leaf = x.clone().requires_grad_()
        loss_of(model(leaf)).backward()


class GivesAView(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1, 2, DIM // 2).transpose(0, 1)


class FromAView(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1).reshape(-1, DIM))


class OutputsAreViews(Case):
    def model(self) -> nn.Module:
        return Tower(GivesAView(), FromAView(), Block())


class InPlaceOnOutputs(Tower):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x.mul_(1.5).add_(1)  # a view of two dims
        x = self.blocks[1](x)
        x *= 2  # not a view
        x = self.blocks[2](x)
        x[:, 1:] += 1
        return self.head(x)


class OutputsAreChangedInPlace(Case):
    def model(self) -> nn.Module:
        return InPlaceOnOutputs(GivesAView(), FromAView(), Block())

    def step(self, model: Any, x: Tensor, number: int) -> None:
        y = model(x)
        y.mul_(0.5)
        y[:, 0] = 0
        loss_of(y).backward()


class PassesItsInputThrough(Block):
    def forward(self, x: Tensor) -> Any:
        return x, super().forward(x), x[:, :1], x.T


class TakesWhatPassed(Block):
    def forward(self, parts: Any) -> Tensor:
        x, y, column, turned = parts
        return super().forward(x * y + column + turned.T)


class AnOutputIsAnInput(Case):
    def model(self) -> nn.Module:
        return Tower(Block(), PassesItsInputThrough(), TakesWhatPassed())


class Nothing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x


class AUnitDoesNothing(Case):
    def model(self) -> nn.Module:
        return Tower(Block(), Nothing(), Block())


class GivesItsParameter(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.up.weight, self.down.weight.T


class TakesAParameter(Block):
    def forward(self, parts: Any) -> Tensor:
        x, one, two = parts
        return super().forward((x @ one.T) @ two)


class AUnitReturnsItsParameter(Case):
    num_warnings = 1
    hides = True

    def model(self) -> nn.Module:
        return Tower(Block(), GivesItsParameter(), TakesAParameter())


class AUnitReturnsAFrozenParameter(AUnitReturnsItsParameter):
    """A unit returns its frozen parameter, in training and without gradients."""

    def units(self, model: Any) -> list[Any]:
        model.blocks[1].requires_grad_(False)
        return super().units(model)

    def step(self, model: Any, x: Tensor, number: int) -> None:
        model.blocks[1].requires_grad_(False)
        with torch.no_grad():
            want = model(x)
        y = model(x)
        assert torch.equal(y, want)
        loss_of(y).backward()


class OnlyItsParameter(Block):
    def forward(self, x: Tensor) -> Any:
        return x, self.up.weight, self.down.weight


class AUnitReturnsNothingButItsParameters(AUnitReturnsItsParameter):
    """A unit's forward returns its input and parameters, and makes no autograd node."""

    def model(self) -> nn.Module:
        return Tower(Block(), OnlyItsParameter(), TakesAParameterLast())

    def check(self, model: Any) -> None:
        """Hooks do not pile up on leaves, which live from step to step."""
        buckets = [bucket for unit in engine_of(model).units for bucket in unit.buckets]
        leaves = [param for bucket in buckets for param in bucket.materialized.params]
        assert max(len(leaf._backward_hooks or ()) for leaf in leaves) == 1


class TakesAParameterLast(Block):
    def forward(self, parts: Any) -> Tensor:
        x, one, two = parts
        return super().forward((x @ one.T) @ two.T)


class ALeafIsTheInputAgainAndAgain(Case):
    num_steps = 4

    def step(self, model: Any, x: Tensor, number: int) -> None:
        if number == 0:
            self.leaf = x.clone().requires_grad_()
        before = 0 if self.leaf.grad is None else self.leaf.grad.clone()
        loss_of(model(self.leaf)).backward()
        assert self.leaf.grad is not None
        self.grad = self.leaf.grad - before
        fresh = self.leaf.detach().clone().requires_grad_()
        loss = loss_of(model(fresh))
        (grad,) = torch.autograd.grad(loss, fresh)
        assert torch.allclose(grad, self.grad, rtol=0, atol=1e-12)

    def check(self, model: Any) -> None:
        assert not self.leaf._backward_hooks
        assert len(self.leaf._post_accumulate_grad_hooks or ()) == 0


class TheInputNeedsNoGradientAndComesTwice(Case):
    def step(self, model: Any, x: Tensor, number: int) -> None:
        y = (x * torch.ones(DIM, dtype=x.dtype, requires_grad=True)) if number else x
        loss_of(model(y) + model(y)).backward()


class AParameterIsAlsoReadDetached(Case):
    """A parameter's gradient arrives before backward reads the parameter for the last time."""

    def model(self) -> nn.Module:
        return Tower(Block(), Straight(), Block())


class Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.gain.detach()).sin() + self.gain


class Calls(Tower):
    def forward(self, x: Tensor, again: int = 2) -> Tensor:
        y = 0.0 if again == 0 else self(x * 2, again=again - 1)
        return super().forward(x) + y


class ARootCallsItself(Case):
    def model(self) -> nn.Module:
        return Calls()


class CallsInside(Block):
    def forward(self, x: Tensor, again: int = 2) -> Tensor:
        y = 0.0 if again == 0 else self(self.up(x)[:, 1:], again=again - 1)
        return super().forward(x) + y


class AnInnerUnitCallsItself(Case):
    def model(self) -> nn.Module:
        return Tower(Block(), CallsInside(), Block())


class Deep(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = Block(), inner, Block()
        self.gain = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)) * self.gain)


class UnitsAreNestedThreeDeep(Case):
    def model(self) -> nn.Module:
        return Tower(Deep(Deep(Deep(Block()))))

    def units(self, model: Any) -> list[Any]:
        outer = model.blocks[0]
        return [outer.inner.inner.inner, outer.inner.inner, outer.inner, outer, model]


class GradientsOfGradients(Case):
    hides = True

    def step(self, model: Any, x: Tensor, number: int) -> None:
        leaf = x.clone().requires_grad_()
        loss = loss_of(model(leaf))
        (grad,) = torch.autograd.grad(loss * x.shape[0], leaf, create_graph=True)
        (loss + grad.square().sum(1).mean()).backward()


class Force(Tower):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            energy = super().forward(leaf).sum()
            (force,) = torch.autograd.grad(energy, leaf, create_graph=self.training)
        return force


class AForwardTakesGradients(Case):
    hides = True

    def model(self) -> nn.Module:
        return Force()


CASES = [kind for kind in vars().values() if isinstance(kind, type) and issubclass(kind, Case)]


@worlds_and_policies
@pytest.mark.parametrize("kind", CASES[1:], ids=lambda kind: kind.__name__)
def test_gradients_equal_those_of_the_unsharded_model(
    pool: RankPool, kind: type[Case], world: int, reshard: bool | None
) -> None:
    pool.run(world, compare, kind, reshard)
