"""Exceptions and dropped losses: the next step is right, and nothing stays in memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from tests.ranks.autograd import (
    Block,
    Case,
    Tower,
    compare,
    engine_of,
    loss_of,
    worlds_and_policies,
)
from tests.ranks.models import Fuse, Trouble
from tests.ranks.pool import RankPool


class Breaks(Block):
    """A block that raises in the middle of its forward, its backward or its recomputation."""

    at = ""
    kind: type[BaseException] = Trouble

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        if self.at == "forward" or (self.at == "recompute" and torch.is_grad_enabled()):
            raise self.kind
        return x + self.down(Fuse.apply(y, self.kind) if self.at == "backward" else y)


class Brittle(Tower):
    """A tower that raises before, between or after its blocks; ``run`` may be a checkpoint."""

    at: Any = None

    def __init__(self) -> None:
        super().__init__(Breaks(), Breaks(), Breaks())

    def run(self, block: nn.Module, x: Tensor) -> Any:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if self.at == number:
                raise Trouble
            x = self.run(block, x)
        x = self.head(x)
        if self.at == "end":
            raise Trouble
        return x


class Fails(Case):
    """A case whose every step fails three times before it succeeds."""

    num_steps = 3
    kind: type[BaseException] = Trouble
    leaves_nothing = True

    def model(self) -> nn.Module:
        return Brittle()

    def fail(self, model: Any, x: Tensor, number: int) -> None:
        """Raise ``kind`` in a step; ``mend`` is called afterwards."""

    def mend(self, model: Any) -> None:
        model.at = None
        for block in model.blocks:
            block.at = ""

    def step(self, model: Any, x: Tensor, number: int) -> None:
        for _ in range(3):
            with pytest.raises(self.kind):
                self.fail(model, x, number)
            self.mend(model)
            if isinstance(model, fullshard.FSDPModule) and self.leaves_nothing:
                engine = engine_of(model)
                assert not any(engine.meter.held_nbytes.values()), engine.meter.held_nbytes
                assert engine.scheduler.idle
            model.zero_grad()
        loss_of(model(x)).backward()


class ABlockFailsInForward(Fails):
    def fail(self, model: Any, x: Tensor, number: int) -> None:
        model.blocks[number].at = "forward"
        model(x)


class TheRootFailsInForward(Fails):
    num_steps = 4

    def fail(self, model: Any, x: Tensor, number: int) -> None:
        model.at = (0, 2, "end", 1)[number]
        model(x)


class AForwardIsInterrupted(Fails):
    """PyTorch calls no module hook after a KeyboardInterrupt, so the next forward cleans up."""

    kind = KeyboardInterrupt
    leaves_nothing = False

    def fail(self, model: Any, x: Tensor, number: int) -> None:
        model.blocks[number].kind = KeyboardInterrupt
        model.blocks[number].at = "forward"
        model(x)


class APartRunsAloneAfterAnInterrupt(AForwardIsInterrupted):
    """A block that runs alone after an interrupt is a root and reads the current weights."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.params = list(model.parameters())
        return super().optimizer(model)

    def step(self, model: Any, x: Tensor, number: int) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.fail(model, x, number)
        self.mend(model)
        with torch.no_grad():
            for param in self.params:
                param.mul_(1.1)
        loss_of(model.blocks[0](x)).backward()


class ABackwardIsInterrupted(Fails):
    kind = KeyboardInterrupt

    def fail(self, model: Any, x: Tensor, number: int) -> None:
        model.blocks[number].kind = KeyboardInterrupt
        model.blocks[number].at = "backward"
        loss_of(model(x)).backward()


class AForwardFailsWithoutGradients(Fails):
    def fail(self, model: Any, x: Tensor, number: int) -> None:
        model.blocks[number].at = "forward"
        with torch.inference_mode():
            model(x)


class ABlockFailsInBackward(Fails):
    def fail(self, model: Any, x: Tensor, number: int) -> None:
        model.blocks[number].at = "backward"
        loss_of(model(x)).backward()


class AForwardFailsBeforeABackward(Fails):
    """A forward fails between another forward and its backward."""

    leaves_nothing = False

    def step(self, model: Any, x: Tensor, number: int) -> None:
        loss = loss_of(model(x))
        with pytest.raises(Trouble):
            model.blocks[number].at = "forward"
            model(x)
        self.mend(model)
        loss.backward()


class ABackwardFailsBeforeAnother(Fails):
    """A backward fails; that of an earlier forward, with a separate graph, still runs."""

    leaves_nothing = False

    def step(self, model: Any, x: Tensor, number: int) -> None:
        loss = loss_of(model(x))
        model.blocks[number].at = "backward"
        bad = loss_of(model(x))
        self.mend(model)
        with pytest.raises(Trouble):
            bad.backward()
        model.zero_grad()
        loss.backward()


class _WithHooks(Fails):
    """A case with a user hook of one of four sorts, which raises."""

    where = ""

    def model(self) -> nn.Module:
        model = super().model()
        self.broken = False
        self.register(model, "before")
        return model

    def shard(self, model: Any, reshard: bool | None) -> None:
        super().shard(model, reshard)
        self.register(model, "after")

    def register(self, model: Any, when: str) -> None:
        if type(self).where.startswith(f"{when} sharding"):
            for module in (model, model.blocks[1]):
                if "pre" in type(self).where:
                    module.register_forward_pre_hook(self.hook)
                else:
                    module.register_forward_hook(self.hook)

    def hook(self, module: nn.Module, *_: Any) -> None:
        if self.broken and (self.number % 2 == 0) == isinstance(module, Block):
            raise Trouble

    def fail(self, model: Any, x: Tensor, number: int) -> None:
        self.broken, self.number = True, number
        model(x)
        raise Trouble  # the unsharded model never gets the late hooks

    def mend(self, model: Any) -> None:
        self.broken = False


class AnEarlyPreHookFails(_WithHooks):
    where = "before sharding, pre"


class AnEarlyHookFails(_WithHooks):
    where = "before sharding"


class ALatePreHookFails(_WithHooks):
    where = "after sharding, pre"


class ALateHookFails(_WithHooks):
    """A late hook of the root runs after the engine's, so its failure resembles a dropped loss."""

    where = "after sharding"
    leaves_nothing = False


class ARecomputeFails(Fails):
    reentrant = False

    def model(self) -> nn.Module:
        model = Brittle()
        model.run = self.run  # type: ignore[method-assign]
        return model

    def run(self, block: nn.Module, x: Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=type(self).reentrant)

    def fail(self, model: Any, x: Tensor, number: int) -> None:
        x = x.clone().requires_grad_()
        loss = loss_of(model(x))
        model.blocks[number].at = "recompute"
        loss.backward()

    def step(self, model: Any, x: Tensor, number: int) -> None:
        super().step(model, x.clone().requires_grad_(), number)

    def good(self, model: Any, x: Tensor) -> None:
        super().good(model, x.clone().requires_grad_())


class ARecomputeFailsReentrant(ARecomputeFails):
    reentrant = True


class ABackwardInARecomputeFails(ARecomputeFails):
    reentrant = True

    def fail(self, model: Any, x: Tensor, number: int) -> None:
        model.blocks[number].at = "backward"
        loss_of(model(x.clone().requires_grad_())).backward()


class ANestedRecomputeFails(ARecomputeFails):
    def run(self, block: nn.Module, x: Tensor) -> Any:
        inner = super().run
        return checkpoint(lambda y: inner(block, y) * 1, x, use_reentrant=type(self).reentrant)


class Inside(Breaks):
    """A block whose reentrant checkpoint ends before its backward fails."""

    def forward(self, x: Tensor) -> Tensor:
        if self.at == "backward":
            x = Fuse.apply(x, self.kind)
        return x + checkpoint(lambda y: self.down(torch.tanh(self.up(y))), x, use_reentrant=True)


class ABackwardDiesBelowACheckpoint(Fails):
    num_steps = 2

    def model(self) -> nn.Module:
        model = Brittle()
        model.blocks = nn.ModuleList([Inside(), Inside(), Inside()])
        return model

    def fail(self, model: Any, x: Tensor, number: int) -> None:
        model.blocks[number].at = "backward"
        loss_of(model(x)).backward()

    def step(self, model: Any, x: Tensor, number: int) -> None:
        super().step(model, x.clone().requires_grad_(), number)

    def good(self, model: Any, x: Tensor) -> None:
        super().good(model, x.clone().requires_grad_())


class _Tries(torch.autograd.Function):
    """The identity; its backward tries one through ``block``, and goes on when that fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.enable_grad():
            x = grads[0].detach().requires_grad_()
            y = ctx.block(x).sum()
        x.register_hook(_fail)
        with pytest.raises(Trouble):
            torch.autograd.grad(y, x)
        return grads[0], None


def _fail(grad: Tensor) -> None:
    raise Trouble


class Trying(Tower):
    tries = False

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        x = first(x)
        x = _Tries.apply(x, third) if self.tries else third(x)
        return self.head(second(x))


class ANestedBackwardFailsAndTheOuterOneGoesOn(Case):
    """The unit of the nested backward is gathered again once the weights have changed."""

    def model(self) -> nn.Module:
        return Trying()

    def step(self, model: Any, x: Tensor, number: int) -> None:
        for model.tries in (False, True):
            loss_of(model(x)).backward()
        model.tries = False


class AHookOfAGradientFails(Fails):
    """A hook fails between the reductions at the end of backward: the others leave nothing."""

    is_broken = False

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        for param in model.blocks[0].parameters():
            param.register_post_accumulate_grad_hook(self.hook)
        return super().optimizer(model)

    def hook(self, param: Tensor) -> None:
        if self.is_broken:
            raise Trouble

    def fail(self, model: Any, x: Tensor, number: int) -> None:
        self.is_broken = True
        loss_of(model(x)).backward()

    def mend(self, model: Any) -> None:
        super().mend(model)
        self.is_broken = False


class ALossIsForgotten(Case):
    """Dropped losses do not increase the number of live objects."""

    def step(self, model: Any, x: Tensor, number: int) -> None:
        for times in (3, 20):
            gc.collect()
            before = len(gc.get_objects())
            for _ in range(times):
                model(x * 2)
            gc.collect()
            grown = len(gc.get_objects()) - before
        assert grown < 20, grown
        if isinstance(model, fullshard.FSDPModule):
            engine = engine_of(model)
            assert engine.scheduler.idle
            kept = [u for u in engine.units if engine.scheduler.residents.units[u.key].residency]
            asked = [u for u in engine.units if self.keeps_unit(engine.policy_of(u), u.name)]
            assert kept == asked
        loss_of(model(x)).backward()

    def keeps_unit(self, policy: Any, name: str) -> bool:
        after = policy.after_forward.name
        return after == "KEEP" or (after == "AUTO" and name == "")


CASES = [kind for kind in vars().values() if isinstance(kind, type) and issubclass(kind, Case)]
CASES = [kind for kind in CASES if kind not in (Case, Fails, _WithHooks)]


@worlds_and_policies
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_a_good_step_follows_a_failed_one(
    pool: RankPool, kind: type[Case], world: int, reshard: bool | None
) -> None:
    pool.run(world, compare, kind, reshard, timeout_s=20.0)
