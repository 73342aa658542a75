"""What users see of a ShardedOptimizer is what they see of the optimizer itself."""

from __future__ import annotations

import pytest
import torch

from fullshard.tensors import local_part
from tests.kit.sharded_optimizer import (
    both_layouts,
)
from tests.kit.sharded_optimizer_state import (
    STATEFUL,
    Pair,
    as_whole_tensors,
    calls_hooks,
    edits,
    exchanges,
    is_copied,
    is_independent,
    loads_a_part,
    older,
    refuses_whole_state,
    scales,
    through_files,
    uses_a_closure,
)
from tests.ranks.pool import RankPool, on_ranks

two_and_three = pytest.mark.parametrize("world", [2, 3])
stateful = pytest.mark.parametrize("kind", list(STATEFUL))


# Loading


@both_layouts
@stateful
@two_and_three
def test_state_dicts_fit_both_ways(pool: RankPool, world: int, kind: str, layout: str) -> None:
    pool.run(world, exchanges, layout, kind)


@both_layouts
def test_part_of_a_state_can_be_loaded(pool: RankPool, layout: str) -> None:
    pool.run(2, loads_a_part, layout)


@both_layouts
def test_a_loaded_state_is_copied(pool: RankPool, layout: str) -> None:
    pool.run(2, is_independent, layout)


@both_layouts
@two_and_three
def test_state_may_be_edited(pool: RankPool, world: int, layout: str) -> None:
    pool.run(world, edits, layout)


@on_ranks(2)
def test_what_is_held_of_the_state_follows() -> None:
    """What users hold of the state stays true, also when runs change."""
    pair = Pair("per_parameter")
    pair.step()
    param = pair.models[0].get_parameter("first.weight")
    own = pair.mine.state[param]
    held = dict(own)
    for number, skip in enumerate((None, "first.bias", None, "back.weight")):
        pair.step(number, skip)
    assert pair.mine.state[param] is own
    assert all(torch.equal(local_part(own[key]), local_part(held[key])) for key in ("exp_avg",))
    pair.check()


def test_state_dicts_of_older_versions_load(pool: RankPool) -> None:
    pool.run(2, older)


def test_whole_state_is_refused_before_anything_steps(pool: RankPool) -> None:
    pool.run(2, refuses_whole_state)


# torch.distributed.checkpoint


@both_layouts
@stateful
def test_checkpoints_of_torch_hold_what_the_optimizer_itself_saves(
    pool: RankPool, kind: str, layout: str
) -> None:
    pool.run(2, through_files, layout, kind)


@both_layouts
@two_and_three
def test_whole_state_dicts_leave_and_enter(pool: RankPool, world: int, layout: str) -> None:
    pool.run(world, as_whole_tensors, layout)


# What calls it, and what it calls


def test_hooks_are_called_once_a_step(pool: RankPool) -> None:
    pool.run(2, calls_hooks)


def test_a_closure_computes_gradients_first(pool: RankPool) -> None:
    pool.run(2, uses_a_closure)


@both_layouts
@pytest.mark.parametrize("fused", [False, True])
def test_steps_under_a_grad_scaler(pool: RankPool, layout: str, fused: bool) -> None:
    pool.run(2, scales, layout, fused)


def test_copies_go_on_by_themselves(pool: RankPool) -> None:
    pool.run(2, is_copied)
