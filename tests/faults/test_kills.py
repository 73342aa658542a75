"""A short run of ``python -m tests.faults``: killed jobs resume from their last checkpoint.

The test kills its ranks, so it starts processes of its own instead of using the session's pool.
"""

from __future__ import annotations

from tests.faults.kills import Killer


def test_nothing_is_lost_when_ranks_are_killed() -> None:
    killer = Killer(seed=1)
    killer.run(6)
    assert killer.kills.total() == 6
