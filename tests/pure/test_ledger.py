"""What a ledger is compared with: those of the same job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fullshard.comm.ledger import ledger_of, ledgers


@contextmanager
def job() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


def test_a_group_of_an_earlier_job_that_is_still_held_is_not_compared() -> None:
    with job() as earlier:
        before = ledger_of(earlier)
        assert ledgers() == [before]
    assert ledgers() == []
    with job() as later:
        now = ledger_of(later)
        assert (now.name, now.ranks) == (before.name, before.ranks) and now is not before
        assert ledgers() == [now]
