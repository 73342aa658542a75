"""The engine on ragged layouts: shards cut at any element, gathered in place."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from fullshard import ParamSpec, Ragged, RaggedTensor, fully_shard
from fullshard.device import BufferKind
from fullshard.frontend.ownership import unit_of
from tests.kit.parity import batches, check, compare, make, shard, train
from tests.ranks.pool import RankPool, every_world, on_ranks


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("kind", ["gpt", "odd"])
def test_a_flat_layout_trains_as_exactly_and_copies_nothing_when_gathering(
    world: int, kind: str, reshard: bool | None
) -> None:
    steps = batches(kind, world, 1)
    plain, model = make(kind, torch.float64), make(kind, torch.float64)
    shard(model, reshard, partial(fully_shard, layout=Ragged()))
    _, want = train(plain, steps, 0, 1)
    _, got = train(model, steps, dist.get_rank(), world)
    assert max((got[name] - want[name]).abs().max().item() for name in want) <= 1e-12
    unit = unit_of(model)
    assert unit is not None and unit.engine is not None
    assert unit.engine.meter.peak_nbytes[BufferKind.GATHER_OUTPUT] == 0
    assert all(isinstance(param, RaggedTensor) for param in model.parameters())


def mixture(spec: ParamSpec) -> str | int:
    """Return a granularity of one of four kinds."""
    return ("row", "tensor", "element", 7)[spec.numel % 4]


GRANULARITIES = {"row": "row", "blocks": 5, "tensor": "tensor", "mixture": mixture}
each_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)


@every_world
@each_granularity
@pytest.mark.parametrize("kind", ["gpt", "odd"])
def test_every_granularity_trains_as_the_unsharded_model(
    pool: RankPool, world: int, kind: str, granularity: str
) -> None:
    layout = Ragged(GRANULARITIES[granularity])
    check(pool.run(world, compare, kind, torch.float64, None, layout=layout), 1e-12, 1e-12)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("sync_always", [True, False])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_it_accumulates_as_the_unsharded_model(
    pool: RankPool, world: int, granularity: str, sync_always: bool
) -> None:
    options = {"accumulate": 3, "sync_always": sync_always, "layout": Ragged(granularity)}
    check(pool.run(world, compare, "odd", torch.float64, True, **options), 1e-12, 1e-12)
