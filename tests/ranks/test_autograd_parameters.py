"""Which parameters get gradients, and changes of parameters between steps."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.ranks.autograd import (
    DIM,
    Block,
    Case,
    Skips,
    Tower,
    compare,
    engine_of,
    loss_of,
    worlds_and_policies,
)
from tests.ranks.pool import RankPool


class Spare(Block):
    """A block with parameters that are used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(DIM, DIM)
        self.asked = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.spare(x) if self.asked else x


class WithSpares(Case):
    def model(self) -> nn.Module:
        return Tower(Spare(), Spare(), Spare())

    def ask(self, model: Any, share: int, number: int) -> None:
        """Choose the spare parameters that a share of the batch uses."""

    def good(self, model: Any, x: Tensor) -> None:
        for part in (*model.blocks, model):
            part.asked = True
        super().good(model, x)

    def step(self, model: Any, x: Tensor, number: int) -> None:
        loss: Any = 0
        for i, part in enumerate(x.chunk(self.num_shares)):
            self.ask(model, self.rank + i, number)
            loss = loss + loss_of(model(part)) / self.num_shares
        loss.backward()


class ParametersAreUnused(WithSpares):
    """Parameters are unused in all steps or in some: AdamW skips parameters without a gradient."""

    num_steps = 4

    def ask(self, model: Any, share: int, number: int) -> None:
        for i, block in enumerate(model.blocks):
            block.asked = number in (1, 3) and i == number % 2


class ParametersAreUnusedOnOneRank(WithSpares):
    num_steps = 4

    def ask(self, model: Any, share: int, number: int) -> None:
        for i, block in enumerate(model.blocks):
            block.asked = share == number % 2 and i != 1


class BothEnds(Tower):
    """A tower whose root has parameters before and after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(DIM, DIM)
        self.asked = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.before(x) if self.asked else x)


class ARootParameterIsUnusedOnOneRank(WithSpares):
    """Ranks reduce the root together, even if one rank skips a root parameter."""

    num_steps = 4

    def model(self) -> nn.Module:
        return BothEnds()

    def ask(self, model: Any, share: int, number: int) -> None:
        model.asked = share != number % 2


class UnitsAreSkipped(Case):
    num_steps = 5

    def model(self) -> nn.Module:
        return Skips()

    def step(self, model: Any, x: Tensor, number: int) -> None:
        model.skipped = [(), (1,), (0, 2), (0, 1, 2), (2,)][number]
        loss_of(model(x)).backward()
        model.skipped = ()


class AUnitRunsWithoutGradients(Case):
    """A unit's output is detached, or its forward runs under no_grad."""

    num_steps = 3

    def model(self) -> nn.Module:
        return Detours()

    def step(self, model: Any, x: Tensor, number: int) -> None:
        model.way = number
        loss_of(model(x)).backward()
        model.way = 2


class Detours(Tower):
    way = 2

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        y = first(x)
        if self.way == 0:
            z = second(y).detach()
        elif self.way == 1:
            with torch.no_grad():
                z = second(y)
        else:
            z = second(y)
        return self.head(third(z + y))


class AFrozenUnitInTheMiddle(Case):
    def model(self) -> nn.Module:
        model = Tower()
        model.blocks[1].requires_grad_(False)
        return model


class OnlyTheFirstUnitLearns(Case):
    def model(self) -> nn.Module:
        model = Tower()
        model.requires_grad_(False)
        model.blocks[0].requires_grad_(True)
        return model


class OnlyTheLastUnitLearns(Case):
    def model(self) -> nn.Module:
        model = Tower()
        model.requires_grad_(False)
        model.blocks[2].down.requires_grad_(True)
        return model


class Adapted(Block):
    """A frozen block with a trainable low-rank adapter, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a = nn.Linear(DIM, 1, bias=False)
        self.b = nn.Linear(1, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.b(self.a(x))


class FrozenAndTrainableInOneUnit(Case):
    """The frozen parameters of a unit are unfrozen, frozen again, then unfrozen in one layer."""

    num_steps = 5

    def model(self) -> nn.Module:
        model = Tower(Adapted(), Adapted(), Adapted())
        model.head.requires_grad_(False)
        return model

    def step(self, model: Any, x: Tensor, number: int) -> None:
        frozen = [n for n, _ in model.named_parameters() if "up" in n or "down" in n]
        for name, param in model.named_parameters():
            if name in frozen:
                param.requires_grad_(number in (1, 3) or (number == 4 and "1.up" in name))
        loss_of(model(x)).backward()


class GradientsAreSwitchedBetweenSteps(Case):
    """Parameters are frozen in turns: some of a unit, all of a unit, but never the head."""

    num_steps = 6

    def step(self, model: Any, x: Tensor, number: int) -> None:
        for i, (name, param) in enumerate(model.named_parameters()):
            param.requires_grad_(name.startswith("head") or (i + number) % 3 != 0)
        if number >= 4:
            model.blocks[number - 4].requires_grad_(False)
        loss_of(model(x)).backward()

    def good(self, model: Any, x: Tensor) -> None:
        model.requires_grad_(True)
        super().good(model, x)


class AListIsOneUnit(Case):
    """Members of a list run in order, not at all, in another order, and several times."""

    num_steps = 6

    def model(self) -> nn.Module:
        return Orders()

    def units(self, model: Any) -> list[Any]:
        return [[model.blocks[0], model.blocks[2]], model.blocks[1], model]

    def step(self, model: Any, x: Tensor, number: int) -> None:
        model.order = [(0, 1, 2), (0, 1), (2,), (2, 1, 0), (0, 0, 2, 1, 2, 0), (1,)][number]
        loss_of(model(x)).backward()
        model.order = (0, 1, 2)


class Orders(Tower):
    order: Any = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = self.blocks[i](x)
        return self.head(x)


class AListIsTheRoot(AListIsOneUnit):
    """A list of modules is the root, while the tower that contains them is not sharded."""

    def units(self, model: Any) -> list[Any]:
        return [model.blocks[1], [model.blocks[0], model.blocks[2], model.head]]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)


class MembersRunStandalone(Case):
    """Members of a list run outside of the root's forward, one after the other."""

    num_steps = 3

    def units(self, model: Any) -> list[Any]:
        return [[model.blocks[0], model.blocks[2]], model.blocks[1], model]

    def step(self, model: Any, x: Tensor, number: int) -> None:
        y = model.blocks[0](x)
        if number == 1:
            y = model.blocks[2](y)
        if number == 2:
            y = model.blocks[1](model.blocks[0](model.blocks[2](y)))
        loss_of(y).backward()


class UnitsRunStandalone(Case):
    def step(self, model: Any, x: Tensor, number: int) -> None:
        for block in list(model.blocks)[number:]:
            x = block(x)
        loss_of(x).backward()


class KeptBetweenSteps(Case):
    """Units kept between steps get the new weights after any change of the shards."""

    num_steps = 7
    keeps = True
    options: ClassVar[dict[str, bool]] = {}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.params = list(model.parameters())
        return torch.optim.AdamW(self.params, lr=0.01, **self.options)

    def shard(self, model: Any, reshard: bool | None) -> None:
        super().shard(model, reshard)
        model.set_reshard_after_backward(False)

    def step(self, model: Any, x: Tensor, number: int) -> None:
        if number in (2, 4):
            with torch.no_grad():
                for param in self.params[:: number // 2]:
                    param.mul_(1.5)
        if number == 5:
            self.params[0].detach().add_(0.1)
        loss_of(model(x)).backward()

    def check(self, model: Any) -> None:
        model.set_reshard_after_backward(True)
        engine_of(model).reshard_all()


class KeptBetweenStepsForeach(KeptBetweenSteps):
    options: ClassVar[dict[str, bool]] = {"foreach": True}


class KeptBetweenStepsFused(KeptBetweenSteps):
    options: ClassVar[dict[str, bool]] = {"fused": True}


class AStepBetweenForwards(Case):
    """Two forwards and backwards, with an optimizer step and a forward between them."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return super().optimizer(model)

    def step(self, model: Any, x: Tensor, number: int) -> None:
        model(x)  # no backward follows
        loss_of(model(x)).backward()
        self.inner.step()
        with torch.no_grad():
            model(x)
        loss_of(model(x)).backward()


CASES = [kind for kind in vars().values() if isinstance(kind, type) and issubclass(kind, Case)]
CASES = [kind for kind in CASES if kind not in (Case, WithSpares)]


@worlds_and_policies
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_parameters_equal_those_of_the_unsharded_model(
    pool: RankPool, kind: type[Case], world: int, reshard: bool | None
) -> None:
    pool.run(world, compare, kind, reshard, timeout_s=15.0)
