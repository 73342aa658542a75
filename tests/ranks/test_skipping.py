"""Ranks skip, repeat and reorder units that ``set_skip_tolerance`` lets them."""

from __future__ import annotations

import pytest

import fullshard
from tests.ranks.pool import RankPool
from tests.ranks.sparse import Case, draw, train

EXACT = 1e-12

CASES: dict[str, Case] = {
    "experts": Case(),
    "blocks": Case(skips="blocks"),
    "nested": Case(skips="nested"),
    "inner": Case(inner=True),
    "freed": Case(options={"reshard_after_forward": True}),
    "kept": Case(options={"reshard_after_forward": False}),
    "ragged": Case(options={"layout": fullshard.Ragged()}),
    "accumulate": Case(accumulate=3),
    "frozen": Case(frozen=("up.weight", "blocks.1.experts.0", "blocks.0.gate")),
    "offload": Case(options={"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False)}),
    "checkpointed blocks": Case(checkpoints="blocks"),
    "checkpointed blocks, reentrant": Case(checkpoints="blocks!"),
    "checkpointed experts": Case(checkpoints="experts"),
    "checkpointed experts, reentrant": Case(checkpoints="experts!"),
    "flat": Case(flat=True),
    "flat, originals": Case(flat=True, options={"use_orig_params": True}, accumulate=2),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_unsharded_model(pool: RankPool, name: str) -> None:
    case = CASES[name]
    program = draw(3, 3, 3, case)
    for result in pool.run(3, train, program, case):
        assert result < EXACT
