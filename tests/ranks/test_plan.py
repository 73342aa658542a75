"""Dry runs equal real ones: the same actions, collectives and bytes."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.ranks.plans import CASES, Found, dry, real
from tests.ranks.pool import RankPool

INSIDE_OF_KERNELS = {"bf16": 0.03, "checkpointed": 0.03}
"""Shares of the peak that CPU kernels take inside of an operation, which no dry run sees."""


def both(name: str) -> tuple[Found, Found]:
    case = CASES[name]
    found = real(case)
    group = dist.group.WORLD
    planned = dry(case, dist.get_rank())
    assert dist.group.WORLD is group
    total = [None] * dist.get_world_size()
    dist.all_gather_object(total, dist.get_rank())  # the world of before still communicates
    assert total == list(range(dist.get_world_size()))
    return found, planned


@pytest.mark.parametrize("name", CASES)
def test_a_dry_run_equals_a_real_one(pool: RankPool, name: str) -> None:
    for found, planned in pool.run(CASES[name].world, both, name):
        assert planned.actions == found.actions
        assert planned.exchanges == found.exchanges
        assert planned.buffers == found.buffers
        assert planned.parameters == found.parameters
        assert planned.gradients == found.gradients
        assert planned.optimizer_state == found.optimizer_state
        assert planned.peak == pytest.approx(found.peak, rel=INSIDE_OF_KERNELS.get(name, 0.002))
