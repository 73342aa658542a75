"""ShardedOptimizer steps exactly as the optimizer it is made of."""

from __future__ import annotations

import pytest
import torch

from tests.kit.sharded_optimizer import (
    FUSED,
    OPTIMIZERS,
    accumulates,
    both_layouts,
    built_on_meta,
    trains,
)
from tests.ranks.pool import RankPool


@both_layouts
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_steps_like_the_optimizer_itself(
    pool: RankPool, world: int, layout: str, kind: str, foreach: bool
) -> None:
    dtype = torch.float32 if world == 2 else torch.float64
    assert set(pool.run(world, trains, layout, kind, dtype, {"foreach": foreach})) == {0.0}


@both_layouts
@pytest.mark.parametrize("kind", FUSED)
def test_fused_steps_differ_by_rounding_only(pool: RankPool, layout: str, kind: str) -> None:
    assert max(pool.run(2, trains, layout, kind, torch.float64, {"fused": True})) <= 1e-15


@both_layouts
def test_steps_where_nothing_is_cut(pool: RankPool, layout: str) -> None:
    assert pool.run(1, trains, layout, "adamw", torch.float64, {}) == [0.0]


@both_layouts
@pytest.mark.parametrize("kind", ["adamw", "adagrad"])
def test_parameters_may_be_on_meta_at_first(pool: RankPool, layout: str, kind: str) -> None:
    assert pool.run(2, built_on_meta, layout, kind) == [0.0, 0.0]


@both_layouts
def test_steps_on_gradients_that_added_up(pool: RankPool, layout: str) -> None:
    assert pool.run(2, accumulates, layout) == [0.0, 0.0]
