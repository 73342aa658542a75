"""Dry runs while ranks are watched: they use other process groups in the same process."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard import watch
from fullshard.comm import dry_world
from fullshard.errors import PeerError
from tests.kit.watch import step, tower
from tests.ranks.models import Trouble, message_of
from tests.ranks.pool import RankPool


def planned() -> str:
    """Run dry on rank 1 for longer than ranks wait, then train, and fail in the last step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_PATIENCE_S", "0.5")
        dist.barrier()
        model: Any = tower("fully_shard", "rows")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, 0)
        watching = watch.watcher()
        assert watching is not None
        if dist.get_rank() == 1:
            with dry_world(4):
                time.sleep(3.0)
        step(model, optimizer, 1)
        assert not watching.is_over, "the watch ended"
        assert watch.watcher() is watching
        model.fault = "forward" if dist.get_rank() == 1 else ""
        return message_of((PeerError, Trouble), step, model, optimizer, 2)


def test_ranks_are_watched_after_a_dry_run_as_before(pool: RankPool) -> None:
    first, second = pool.run(2, planned)
    assert first.startswith("rank 1 failed") and second == "in forward"
