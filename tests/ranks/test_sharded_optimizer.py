"""ShardedOptimizer steps exactly as the optimizer inside, and shows the same state."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests.kit.sharded_optimizer import (
    FUSED,
    LAYOUTS,
    OPTIMIZERS,
    accumulates,
    both_layouts,
    built_on_meta,
    trains,
)
from tests.kit.sharded_optimizer_state import (
    STATEFUL,
    as_whole_tensors,
    calls_hooks,
    edits,
    exchanges,
    follows,
    is_copied,
    is_independent,
    loads_a_part,
    older,
    refuses_whole_state,
    scales,
    through_files,
    uses_a_closure,
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


SEEN: list[tuple[Any, ...]] = [
    *product([built_on_meta], (2,), LAYOUTS, ("adamw", "adagrad")),
    *product([accumulates], (2,), LAYOUTS),
    *product([exchanges], (2, 3), LAYOUTS, STATEFUL),
    *product([edits, as_whole_tensors], (2, 3), LAYOUTS),
    *product([through_files], (2,), LAYOUTS, STATEFUL),
    *product([loads_a_part, is_independent], (2,), LAYOUTS),
    *product([scales], (2,), LAYOUTS, (False, True)),
    *product([follows, older, refuses_whole_state, is_copied, calls_hooks, uses_a_closure], (2,)),
]
"""Jobs, each with its number of ranks and its arguments."""


@pytest.mark.parametrize(
    "case", SEEN, ids=lambda case: "-".join(getattr(one, "__name__", str(one)) for one in case)
)
def test_what_users_see_is_that_of_the_optimizer_itself(
    pool: RankPool, case: tuple[Any, ...]
) -> None:
    job, world, *given = case
    pool.run(world, job, *given)
