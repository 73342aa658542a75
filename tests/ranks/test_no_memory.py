"""Memory runs out when a collective begins, on all ranks alike: programs may try again."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fullshard
from fullshard.engine.reduce_input import ReduceInput
from fullshard.engine.unshard import FlatGather
from tests.ranks.autograd import DIM, Tower, check_rest, engine_of, loss_of
from tests.ranks.models import fill, noise
from tests.ranks.pool import RankPool


class Fails:
    """Lets the second gather of a model fail when it begins, as if memory had run out."""

    def __init__(self) -> None:
        self.number = 0

    def start(self, gather: FlatGather) -> Any:
        self.number += 1
        if self.number == 2:
            gather.buffers[0].allocate()
            raise MemoryError("no room for a gather")
        return START(gather)


START = FlatGather.start


def sharded(reshard: bool | None = None) -> tuple[Any, dict[str, Tensor]]:
    model = fill(Tower().to(torch.float64))
    full = {name: value.clone() for name, value in model.state_dict().items()}
    for block in model.blocks:
        fullshard.fully_shard(block, reshard_after_forward=reshard)
    fullshard.fully_shard(model, reshard_after_forward=reshard)
    return model, full


def is_retried(after: str) -> None:
    model, full = sharded()
    engine = engine_of(model)
    fails = Fails()
    with mock.patch.object(FlatGather, "start", lambda gather: fails.start(gather)):
        model.blocks[0].unshard()
        with pytest.raises(MemoryError, match="no room"):
            model.blocks[1].unshard()
    if after == "unshard":
        model.blocks[1].unshard()
        shown = dict(model.blocks[1].named_parameters())
        for name, value in shown.items():
            assert torch.equal(value, full[f"blocks.1.{name}"])
        model.blocks[0].reshard()
        model.blocks[1].reshard()
    if after == "reset":
        model.reset_iter_state()
        check_rest(model)
    model(noise(2, DIM, seed=0)).sum().backward()
    want = fill(Tower().to(torch.float64))
    want(noise(2, DIM, seed=0)).sum().backward()
    for (name, param), expected in zip(model.named_parameters(), want.parameters(), strict=True):
        assert torch.allclose(param.grad.full_tensor(), expected.grad), name
    assert engine.scheduler.idle
    check_rest(model)


@pytest.mark.parametrize("after", ["unshard", "reset", "forward"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_gather_that_failed_is_made_again(pool: RankPool, world: int, after: str) -> None:
    pool.run(world, is_retried, after)


def goes_on() -> None:
    """A forward fails in a gather; the caller catches that on all ranks and takes the next."""
    model, _ = sharded()
    fails = Fails()
    with (
        mock.patch.object(FlatGather, "start", lambda gather: fails.start(gather)),
        pytest.raises(MemoryError, match="no room"),
    ):
        model(noise(2, DIM, seed=0))
    loss_of(model(noise(2, DIM, seed=1))).backward()
    check_rest(model)


def test_a_forward_follows_one_whose_gather_failed(pool: RankPool) -> None:
    pool.run(2, goes_on)


def repeats_the_step() -> None:
    """Gradients of earlier microbatches are lost, which the error says."""
    model, _ = sharded()
    want = fill(Tower().to(torch.float64))
    model.set_requires_gradient_sync(False)
    for one in (model, want):
        loss_of(one(noise(2, DIM, seed=0))).backward()
    model.set_requires_gradient_sync(True)
    no_room = mock.Mock(side_effect=MemoryError("no room for a reduction"))
    with (
        mock.patch.object(ReduceInput, "allocate", no_room),
        pytest.raises(MemoryError, match="no room") as raised,
    ):
        loss_of(model(noise(2, DIM, seed=1))).backward()
    (note,) = raised.value.__notes__
    assert "are lost for unit blocks.2. Call reset_iter_state()" in note
    model.reset_iter_state()
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    loss_of(model(noise(2, DIM, seed=0))).backward()
    model.set_requires_gradient_sync(True)
    for one in (model, want):
        loss_of(one(noise(2, DIM, seed=1))).backward()
    for (name, param), expected in zip(model.named_parameters(), want.parameters(), strict=True):
        assert torch.allclose(param.grad.full_tensor(), expected.grad), name
    check_rest(model)


def test_a_reduction_that_failed_tells_of_lost_gradients(pool: RankPool) -> None:
    pool.run(2, repeats_the_step)
