"""Combinations of autograd cases, as real training loops have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from tests.ranks.autograd import (
    DIM,
    Block,
    Case,
    Tower,
    check_rest,
    compare,
    engine_of,
    loss_of,
    worlds_and_policies,
)
from tests.ranks.models import Fuse, noise
from tests.ranks.pool import RankPool


class Hides(Block):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(x=super().forward(x))


class Finds(Block):
    def forward(self, hidden: Any) -> Tensor:
        return super().forward(hidden.x)


class Hidden(Case):
    """One block returns its output in an object, where the engine can put no hook."""

    num_warnings = 1
    hides = True

    def model(self) -> nn.Module:
        return Tower(Block(), Hides(), Finds())


class HiddenOutputsOfTwoForwards(Hidden):
    """A backward after each of two forwards, in either order."""

    num_steps = 3

    def step(self, model: Any, x: Tensor, number: int) -> None:
        losses = [loss_of(model(x)), loss_of(model(x * 2))]
        for loss in losses if number % 2 else losses[::-1]:
            loss.backward()


class HiddenOutputsOfARetainedGraph(Hidden):
    def step(self, model: Any, x: Tensor, number: int) -> None:
        loss = loss_of(model(x))
        loss.backward(retain_graph=True)
        loss.backward()


class HiddenOutputsWithAnEvaluationBetween(Hidden):
    def step(self, model: Any, x: Tensor, number: int) -> None:
        loss = loss_of(model(x))
        with torch.no_grad():
            model(x)
        loss.backward()


class HiddenOutputsAndABackwardThatDies(Hidden):
    """A backward that raises leaves the graph of an earlier forward usable."""

    def step(self, model: Any, x: Tensor, number: int) -> None:
        loss = loss_of(model(x))
        with pytest.raises(KeyError):
            loss_of(model(Fuse.apply(x.cos().requires_grad_(), KeyError))).backward()
        model.zero_grad()
        loss.backward()


class ChangesItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(self.up(x.clone())[:, 1:])
        return self.down(torch.tanh(self.up(x.clone())))


class ReadsTheInput(Tower):
    """A tower whose backward may reach a unit through the unit's input instead of its output."""

    ways = "input"

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        x = first(x)
        y = second(x)
        return self.head(third({"input": x, "output": y, "both": x + y}[self.ways]))


class AnInputIsChangedInPlaceAndReadAfterwards(Case):
    num_steps = 3

    def model(self) -> nn.Module:
        return ReadsTheInput(Block(), ChangesItsInput(), Block())

    def step(self, model: Any, x: Tensor, number: int) -> None:
        model.ways = ("input", "both", "output")[number]
        loss_of(model(x)).backward()


class APenaltyOfGradients(Case):
    """The loss has a penalty on gradients, computed in a separate forward."""

    hides = True

    def penalty(self, model: Any, x: Tensor) -> Tensor:
        leaf = x.cos().requires_grad_()
        # With the mean over a share of the batch, a row's gradient would depend on the share's
        # size.
        score = loss_of(model(leaf)) * x.shape[0]
        (grad,) = torch.autograd.grad(score, leaf, create_graph=True)
        return grad.square().sum(1).mean()

    def step(self, model: Any, x: Tensor, number: int) -> None:
        (loss_of(model(x)) + self.penalty(model, x)).backward()


class APenaltyWhoseBackwardComesFirst(APenaltyOfGradients):
    def step(self, model: Any, x: Tensor, number: int) -> None:
        loss = loss_of(model(x))
        self.penalty(model, x).backward()
        loss.backward()


class APenaltyWhoseBackwardComesLast(APenaltyOfGradients):
    """The usual backward runs first and keeps the units that the penalty's backward reads."""

    def step(self, model: Any, x: Tensor, number: int) -> None:
        loss = loss_of(model(x))
        penalty = self.penalty(model, x)
        loss.backward()
        penalty.backward()


class TwoPenalties(APenaltyOfGradients):
    def step(self, model: Any, x: Tensor, number: int) -> None:
        first, second = self.penalty(model, x), self.penalty(model, x * 2)
        first.backward()
        second.backward()


class Gate(nn.Module):
    """A module that uses its only parameter on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(DIM))
        self.asked = True

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain if self.asked else x * 1


class AMemberIsUnusedOnOneRank(Case):
    """Ranks agree to reduce a list after its last member, though one rank skips a member."""

    num_steps = 3

    def model(self) -> nn.Module:
        return Tower(Block(), Gate(), Block(), Block())

    def units(self, model: Any) -> list[Any]:
        return [[model.blocks[1], model.blocks[3]], model.blocks[0], model.blocks[2], model]

    def gate(self, model: Any) -> Any:
        return model.blocks[1]

    def step(self, model: Any, x: Tensor, number: int) -> None:
        loss: Any = 0
        for i, part in enumerate(x.chunk(self.num_shares)):
            self.gate(model).asked = self.rank + i != number % 2
            loss = loss + loss_of(model(part)) / self.num_shares
        loss.backward()
        self.gate(model).asked = True


class First(Gate):
    """A module used at both ends of the model, each time with other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, end: bool = False) -> Tensor:
        return self.last(x) if end else super().forward(x)


class Wrapper(Tower):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            x = block(x)
        return self.head(self.blocks[0](x, end=True))


class AParameterIsUnusedInOneUseOnOneRank(AMemberIsUnusedOnOneRank):
    """A parameter is unused in one use on one rank; every use still has a backward."""

    def model(self) -> nn.Module:
        return Wrapper(First(), Block(), Block())

    def units(self, model: Any) -> list[Any]:
        return [*model.blocks, model]

    def gate(self, model: Any) -> Any:
        return model.blocks[0]

    def step(self, model: Any, x: Tensor, number: int) -> None:
        super().step(model, x.clone().requires_grad_(), number)


class Crossed(Tower):
    """A tower whose blocks all read the output of the first block."""

    def forward(self, x: Tensor) -> Tensor:
        memory = self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            x = block(x + memory)
        return self.head(x)


class AnOutputIsReadByAllLaterUnits(Case):
    def model(self) -> nn.Module:
        return Crossed()


class Rivals(nn.Module):
    """Two sharded models in one plain module; each is the root of its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = Tower(), Tower()
        self.maker.head = nn.Linear(DIM, DIM)


class TwoModelsTrainEachOther(Case):
    def model(self) -> nn.Module:
        return Rivals()

    def units(self, model: Any) -> list[Any]:
        return [*model.maker.blocks, model.maker, *model.judge.blocks, model.judge]

    def step(self, model: Any, x: Tensor, number: int) -> None:
        model.judge.requires_grad_(False)
        loss_of(model.judge(model.maker(x))).backward()
        model.judge.requires_grad_(True)
        with torch.no_grad():
            made = model.maker(x)
        (loss_of(model.judge(x)) - loss_of(model.judge(made))).backward()
        if isinstance(model.judge, fullshard.FSDPModule):
            check_rest(model.judge)
            check_rest(model.maker)

    def good(self, model: Any, x: Tensor) -> None:
        loss_of(model.judge(model.maker(x))).backward()

    def check(self, model: Any) -> None:
        assert engine_of(model.judge) is not engine_of(model.maker)


class AFreezeBetweenForwardAndBackward(Case):
    """A parameter that was frozen in forward gets no gradient, even if trainable in backward."""

    def step(self, model: Any, x: Tensor, number: int) -> None:
        model.blocks[1].requires_grad_(False)
        loss = loss_of(model(x))
        model.blocks[1].requires_grad_(True)
        loss.backward()


class AFreezeBetweenForwardAndBackwardTheOtherWay(Case):
    """A parameter that is frozen in backward gets no gradient, even if trainable in forward."""

    reduces = True

    def step(self, model: Any, x: Tensor, number: int) -> None:
        for frozen in (model.blocks[1], model.blocks[0].up):  # all and a part of a unit
            loss = loss_of(model(x))
            frozen.requires_grad_(False)
            if isinstance(model, fullshard.FSDPModule):
                model.set_requires_gradient_sync(self.reduces)
            loss.backward()
            frozen.requires_grad_(True)
        if isinstance(model, fullshard.FSDPModule):
            model.set_requires_gradient_sync(True)
        loss_of(model(2 * x)).backward()


class AFreezeBeforeABackwardThatReducesNothing(AFreezeBetweenForwardAndBackwardTheOtherWay):
    reduces = False


class AnEvaluationWithoutAdapters(Case):
    """Between forward and backward, an evaluation runs with some parameters frozen."""

    def step(self, model: Any, x: Tensor, number: int) -> None:
        loss = loss_of(model(x))
        frozen = [model.blocks[1].up.weight, *model.blocks[2].parameters(), model.head.bias]
        for param in frozen:
            param.requires_grad_(False)
        with torch.no_grad():
            model(x)
        for param in frozen:
            param.requires_grad_(True)
        loss.backward()


class Repeats(Block):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class ACheckpointedEvaluationWithoutAdapters(AnEvaluationWithoutAdapters):
    def model(self) -> nn.Module:
        return Tower(Repeats(), Repeats(), Repeats())


class Autocast(Case):
    """Autocast caches casts of parameters until it ends. All ranks get the same batch here."""

    limit = 1e-6
    dtype = torch.float32

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def step(self, model: Any, x: Tensor, number: int) -> None:
        x = noise(2, DIM, seed=number, dtype=x.dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
            assert y.dtype == torch.bfloat16
            loss = loss_of(y.float())
            again = loss_of(model(x * 2).float())
        (loss + again).backward()

    def good(self, model: Any, x: Tensor) -> None:
        self.step(model, x, 0)


class AutocastWithoutItsCache(Autocast):
    """The backward runs in the autocast context too."""

    def step(self, model: Any, x: Tensor, number: int) -> None:
        x = noise(2, DIM, seed=number, dtype=x.dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            loss_of(model(x).float()).backward()


CASES = [kind for kind in vars().values() if isinstance(kind, type) and issubclass(kind, Case)]
CASES = [kind for kind in CASES if kind is not Case]


@worlds_and_policies
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_mixed_cases_equal_the_unsharded_model(
    pool: RankPool, kind: type[Case], world: int, reshard: bool | None
) -> None:
    pool.run(world, compare, kind, reshard, timeout_s=20.0)
