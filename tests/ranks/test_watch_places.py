"""The place of a failure in a step, as other ranks report it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard import watch
from fullshard.errors import PeerError
from tests.ranks.models import Fuse, Trouble, fill, noise, shard_units
from tests.ranks.pool import RankPool, on_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.fault = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "recompute" and torch._C._current_graph_task_id() != -1:
            raise Trouble("run again")
        x = torch.tanh(self.down(torch.tanh(self.up(x))))
        return Fuse.apply(x, Trouble) if self.fault == "backward" else x


class Tower(nn.Module):
    """Blocks that are recomputed in backward, where PyTorch ends a recomputation early."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def tower() -> Tower:
    model = fill(Tower(), scale=0.4)
    return shard_units(model, model.blocks)


def places() -> list[str]:
    return [one.place for one in watch.steps() if one.place]


def left_in(fault: str) -> str:
    """Fail on rank 1 in the second step; return the error of this rank."""
    model, said = tower(), ""
    for number in range(3):
        is_hit = number == 1 and dist.get_rank() == 1
        model.blocks[0].fault = fault if is_hit else ""
        try:
            model(noise(3, 6, seed=number).float()).square().sum().backward()
        except (PeerError, Trouble) as error:
            said = str(error)
            assert bool(places()) == is_hit
        else:
            assert not places()
    return said


def test_a_block_that_ran_again_is_not_where_a_later_exception_was_raised(pool: RankPool) -> None:
    told = pool.run(2, left_in, "backward")[0]
    assert told.startswith("rank 1 failed: an exception, in the backward of unit blocks.0; "), told
    told = pool.run(2, left_in, "recompute")[0]
    assert told.startswith("rank 1 failed: an exception, in the forward of unit blocks.0; "), told


@on_ranks(2)
def test_what_was_caught_is_not_where_a_later_exception_was_raised() -> None:
    """After a caught error of one model, training another one reports no place."""
    model, other = tower(), tower()
    model.blocks[0].fault = "backward"
    try:
        model(noise(3, 6, seed=0).float()).square().sum().backward()
    except Trouble:
        assert places() == ["in the backward of unit blocks.0"]
    other(noise(3, 6, seed=0).float()).square().sum().backward()
    assert not places()
