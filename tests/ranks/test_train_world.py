"""What workers tell each other besides training."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fullshard.errors import ConfigError
from fullshard.train.world import World
from tests.ranks.pool import RankPool, every_world


def here() -> World:
    return World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def rows() -> list[list[float]]:
    world = here()
    loss = torch.tensor(1 / (3 + world.rank), dtype=torch.float64)
    return world.rows(loss, 2**52 + world.rank).tolist()


@every_world
def test_every_worker_sees_the_figures_of_all_exactly(pool: RankPool, world: int) -> None:
    expected = [[1 / (3 + rank), 2.0**52 + rank] for rank in range(world)]
    assert pool.run(world, rows) == [expected] * world


def refuse_on(ranks: list[int]) -> str:
    world = here()
    try:
        world.agree(f"worker {world.rank} cannot" if world.rank in ranks else None)
    except ConfigError as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize(
    ("ranks", "answer"), [([], "agreed"), ([1], "worker 1 cannot"), ([2, 1], "worker 1 cannot")]
)
def test_one_refusal_is_everybodys(pool: RankPool, ranks: list[int], answer: str) -> None:
    assert pool.run(3, refuse_on, ranks) == [answer] * 3
