"""Numbers of collectives in a step, and bytes of unsharded parameters."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.device import BufferKind
from fullshard.frontend.ownership import unit_of
from tests.kit.parity import shard, use_checkpoints
from tests.ranks.models import GPT, fill, ids
from tests.ranks.pool import RankPool, every_world, on_ranks
from tests.recording import recordings

Call = tuple[str, int]


def step(model: nn.Module, seed: int = 0) -> None:
    tokens = ids(2, 8, vocab=53, seed=seed + 10 * dist.get_rank())
    GPT.loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("checkpointing", ["", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_one_gather_each_way_and_one_reduction_per_unit_and_step(
    reshard: bool | None, checkpointing: str
) -> None:
    freed = {"all_gather": 2, "reduce_scatter": 1}
    kept = {"all_gather": 1, "reduce_scatter": 1}
    blocks = kept if reshard is False else freed
    root = freed if reshard is True else kept
    with recordings() as made:
        model = fill(GPT())
        shard(model, reshard)
    if checkpointing:
        use_checkpoints(model, checkpointing == "reentrant")
    for seed in range(3):  # from the second step on, the order of units is known
        for recording in made:
            recording.calls.clear()
        step(model, seed)
    result = [dict(Counter(call.kind for call in recording.calls)) for recording in made]
    assert result == [blocks, blocks, blocks, root]


def bytes_of_steps(budget: int | None) -> dict[str, Any]:
    model = fill(GPT(layers=5))
    shard(model, True)
    unit = unit_of(model)
    assert unit is not None
    engine = unit.engine
    assert engine is not None
    if isinstance(model, fullshard.FSDPModule):
        model.set_prefetch_budget(budget)
    step(model)
    engine.meter.reset_peak()
    for seed in range(2):
        step(model, seed)
    blocks = [unit.nbytes for unit in engine.units[:-1]]
    return {
        "peak": engine.meter.peak_nbytes[BufferKind.UNSHARDED],
        "staging": engine.meter.peak_nbytes[BufferKind.GATHER_OUTPUT],
        "held": sum(engine.meter.held_nbytes.values()),
        "largest": max(blocks),
        "root": engine.units[-1].nbytes,
        "most_staging": 2
        * dist.get_world_size()
        * max(b.shard.nbytes for u in engine.units for b in u.buckets),
    }


@every_world
@pytest.mark.parametrize("num_units", [None, 0, 1, 2, 3])
def test_unsharded_bytes_stay_within_the_bound(
    pool: RankPool, world: int, num_units: int | None
) -> None:
    """The peak is at most max(prefetch budget, largest unit) + root; staging counts apart."""
    largest = pool.run(world, bytes_of_steps, None)[0]["largest"]
    budget = None if num_units is None else num_units * largest
    for got in pool.run(world, bytes_of_steps, budget):
        # By default, one unit ahead is in the staging.
        assert 0 < got["peak"] <= max(budget or 0, largest) + got["root"]
        if budget is None:
            assert got["staging"] <= got["most_staging"]
        assert got["held"] == 0


class Chooser(nn.Module):
    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor, choose_b: bool) -> torch.Tensor:
        x = self.layers["a"](x)
        return self.layers["b"](x) if choose_b else x


@on_ranks(2, 3, 4)
def test_a_gradient_is_none_only_where_no_rank_has_one() -> None:
    """Rank 1 alone uses the second layer, and no rank uses the third."""
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in "abc"})
    model = fill(Chooser(model.double()))  # type: ignore[assignment]
    fullshard.fully_shard(model)
    model(torch.ones(2, 3, dtype=torch.float64), dist.get_rank() == 1).sum().backward()
    missing = [(name, p.grad is None) for name, p in model.named_parameters()]
    assert {name for name, is_none in missing if is_none} == {
        "layers.c.weight",
        "layers.c.bias",
    }
