"""Jobs that go on after a fault, in one process: what they leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import Life, fully_shard, resilient
from fullshard.errors import PeerError
from fullshard.recover import handover
from tests.ranks.pool import RankPool
from tests.ranks.test_autograd_failures import Trouble


def handed_on(folder: Path, error: type[Exception] | None) -> tuple[int, int]:
    """Hand on the state of a first step, to a life that ends, by ``error``, before it takes it up.

    Returns:
        How many files there were in memory then, and how many are left.
    """
    memory = folder / "memory"
    memory.mkdir()
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    meanwhile = []

    def train(life: Life) -> bool:
        if life.number:
            meanwhile.extend(memory.iterdir())
            if error is not None:
                raise error("no")
            return True
        model = fully_shard(nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        life.load([], model, optimizer)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        life.reached(1)
        raise PeerError("rank 1 failed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handover, "_MEMORY", memory)
        try:
            resilient(train, max_restarts=1)
        except (Trouble, PeerError) as raised:
            assert error is not None and isinstance(raised, error)
        else:
            assert error is None
            dist.destroy_process_group()
    return len(meanwhile), len([*memory.iterdir()])


@pytest.mark.parametrize("error", [Trouble, PeerError, None])
def test_state_that_nobody_took_up_is_not_left_in_memory(
    pool: RankPool, tmp_path: Path, error: type[Exception] | None
) -> None:
    assert pool.run(1, handed_on, tmp_path, error, process_group=False) == [(1, 0)]
