"""Gradients that accumulate over several backwards, with and without a reduction after each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
from tests.ranks.autograd import (
    Block,
    Case,
    Skips,
    Tower,
    compare,
    loss_of,
    worlds_and_policies,
)
from tests.ranks.models import Weighs
from tests.ranks.pool import RankPool
from tests.versions import TORCH

F32, B16 = torch.float32, torch.bfloat16


def add_up(param_dtype: Any, reduce_dtype: Any, sync: list[bool]) -> list[float]:
    """Return the gradient after microbatches whose gradients are 256, 1 and 1."""
    model = Weighs()
    policy = fullshard.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    fullshard.fully_shard(model, mp_policy=policy)
    for value, reduces in zip([256.0, 1.0, 1.0], sync, strict=True):
        model.set_requires_gradient_sync(reduces)
        model(torch.full((5,), value)).backward()
    grad = model.weight.grad
    assert isinstance(grad, DTensor)
    assert grad.dtype == F32
    whole: list[float] = grad.full_tensor().tolist()
    return whole


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "expected"),
    [
        (None, None, 258.0),
        (None, F32, 258.0),
        (None, B16, 258.0),
        (B16, None, 256.0 if TORCH < (2, 15) else 258.0),
        (B16, B16, 256.0),
        (B16, F32, 258.0),
    ],
)
def test_pending_gradients_add_up_in_the_wider_dtype(
    pool: RankPool, param_dtype: Any, reduce_dtype: Any, expected: float, world: int
) -> None:
    sync = [False, False, True]
    for found in pool.run(world, add_up, param_dtype, reduce_dtype, sync):
        assert found == [expected] * 5


@pytest.mark.parametrize("sync", [[True, True, True], [True, False, True], [False, True, True]])
@pytest.mark.parametrize("reduce_dtype", [None, F32, B16])
@pytest.mark.parametrize("param_dtype", [None, F32, B16])
def test_reduced_gradients_add_up_in_the_dtype_of_the_shards(
    pool: RankPool, param_dtype: Any, reduce_dtype: Any, sync: list[bool]
) -> None:
    given = reduce_dtype
    if reduce_dtype is None and TORCH >= (2, 15):
        reduce_dtype = F32  # the parameters' dtype, whatever the compute dtype
    # 256 + 1 is lost only if both are pending in bf16, or if one bf16 reduction carries both.
    narrow = B16 in (param_dtype, reduce_dtype)
    lossy = {
        (True, True, True): False,
        (True, False, True): False,
        (False, True, True): narrow and (param_dtype != B16 or reduce_dtype != F32),
    }[sync[0], sync[1], sync[2]]
    for found in pool.run(2, add_up, param_dtype, given, sync):
        assert found == [257.0 if lossy else 258.0] * 5


class Accumulates(Case):
    """A case of several passes a step; ``sync`` says which of them reduce."""

    num_steps = 3
    sync: Any = (False, False, True)

    def step(self, model: Any, x: Tensor, number: int) -> None:
        for micro, reduces in enumerate(self.sync):
            self.before(model, micro, reduces)
            loss_of(model(x * (micro + 1))).backward()

    def before(self, model: Any, micro: int, reduces: bool) -> None:
        if isinstance(model, fullshard.FSDPModule):
            model.set_requires_gradient_sync(reduces)


class SyncAndNoSyncMixed(Accumulates):
    sync = (False, True, False, False, True, True)


class NoSyncKeptUnsharded(Accumulates):
    """Units stay unsharded between the passes."""

    def before(self, model: Any, micro: int, reduces: bool) -> None:
        super().before(model, micro, reduces)
        if isinstance(model, fullshard.FSDPModule):
            model.set_reshard_after_backward(reduces)


class OnlySomeUnitsReduce(Accumulates):
    """The root and one block reduce in each pass; the other blocks follow ``sync``."""

    def before(self, model: Any, micro: int, reduces: bool) -> None:
        if isinstance(model, fullshard.FSDPModule):
            for block in list(model.blocks)[1:]:
                block.set_requires_gradient_sync(reduces, recurse=False)


class ReductionsEndWithTheLast(Accumulates):
    sync = (True, True, True)

    def before(self, model: Any, micro: int, reduces: bool) -> None:
        if isinstance(model, fullshard.FSDPModule):
            model.set_is_last_backward(micro == 2)


class UnitsAreSkippedInPassesThatWait(Accumulates):
    def model(self) -> nn.Module:
        return Skips()

    def before(self, model: Any, micro: int, reduces: bool) -> None:
        super().before(model, micro, reduces)
        model.skipped = () if reduces else (micro,)


class AUnitIsSkippedInThePassThatReduces(Accumulates):
    """A unit that is skipped in the reducing pass keeps its pending gradients for this step."""

    def model(self) -> nn.Module:
        return Skips()

    def before(self, model: Any, micro: int, reduces: bool) -> None:
        super().before(model, micro, reduces)
        model.skipped = (1,) if reduces else ()

    def good(self, model: Any, x: Tensor) -> None:
        model.skipped = ()
        super().good(model, x)


class Spare(Block):
    asked = False

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * self.gain if self.asked else y


class AParameterIsUsedOnlyInPassesThatWait(Accumulates):
    """Parameters are used on one rank only, and only in passes without a reduction."""

    def model(self) -> nn.Module:
        return Tower(Spare(), Spare(), Spare())

    def step(self, model: Any, x: Tensor, number: int) -> None:
        for micro, reduces in enumerate(self.sync):
            self.before(model, micro, reduces)
            loss: Any = 0
            for i, part in enumerate(x.chunk(self.num_shares)):
                for block in model.blocks:
                    block.asked = not reduces and self.rank + i == 1
                loss = loss + loss_of(model(part)) / self.num_shares
            loss.backward()
        for block in model.blocks:
            block.asked = True


CASES = [kind for kind in vars().values() if isinstance(kind, type) and issubclass(kind, Case)]
CASES = [kind for kind in CASES if kind is not Case]


@worlds_and_policies
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_accumulated_gradients_equal_those_of_the_unsharded_model(
    pool: RankPool, kind: type[Case], world: int, reshard: bool | None
) -> None:
    pool.run(world, compare, kind, reshard, timeout_s=20.0)
