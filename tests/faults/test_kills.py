"""A short part of ``python -m tests.faults``: jobs that are killed go on from what they saved.

The processes are not those of the session's pool, as they are killed.
"""

from __future__ import annotations

from tests.faults.kills import Killer


def test_nothing_is_lost_when_ranks_are_killed() -> None:
    killer = Killer(seed=1)
    killer.run(6)
    assert killer.kills.total() == 6
