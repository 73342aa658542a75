"""A short run of ``python -m tests.faults recover``: jobs continue after ranks are killed.

The tests kill ranks, so they start processes of their own instead of using the session's pool.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults.rank import Wire
from tests.faults.recovery import drawn, run
from tests.faults.resilient_rank import Plan, Stroke
from tests.faults.rows import Fault, Phase, What


def killed(member: int, life: int, step: int, phase: Phase) -> Stroke:
    return Stroke(member, life, step, Fault(What.KILL, phase))


PLANS = {
    # The second rank is killed while the others load the checkpoint.
    "two after each other": Plan(4, (killed(0, 0, 5, Phase.FORWARD), killed(2, 1, 3, Phase.BUILD))),
    # The replica of the stopped rank would wait forever for it in the first reduction.
    "as replicas meet": Plan(
        4, (Stroke(2, 0, 1, Fault(What.STOP, Phase.FORWARD, 2)),), ((1, 1.4),), replicas=2
    ),
    "in a save": Plan(3, (killed(1, 0, 4, Phase.SAVE),), wire=Wire.SOCKETS, mode="async"),
    "all but one": Plan(3, (killed(0, 0, 5, Phase.GATHER),), ((2, 0.0),)),
}
MACHINES = Plan(3, (killed(1, 0, 7, Phase.FORWARD),), copies=2)
RAISED = Plan(2, (Stroke(1, 0, 5, Fault(What.RAISE, Phase.BACKWARD)),), every=9, hands_over=True)
HANDED = {
    # No checkpoint is saved, so the state is in memory only.
    "a replica is lost": Plan(
        4, (killed(1, 0, 5, Phase.BACKWARD),), every=9, hands_over=True, replicas=2
    ),
    "nobody is lost": RAISED,
    "raised in forward": replace(
        RAISED, strokes=(Stroke(0, 0, 5, Fault(What.RAISE, Phase.FORWARD)),), wire=Wire.SOCKETS
    ),
    "one more as the others take it up": Plan(
        4,
        (killed(1, 0, 5, Phase.DATA), killed(3, 1, 5, Phase.BUILD)),
        every=9,
        hands_over=True,
        replicas=2,
    ),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_job_goes_on_without_ranks_that_are_killed(plan: Plan) -> None:
    """The final weights equal those of a training without faults, whatever the world sizes."""
    seen = run(plan)
    assert not seen.wrong, f"{seen.wrong}\n{seen.told}"


@pytest.mark.parametrize("plan", HANDED.values(), ids=HANDED)
def test_the_state_of_those_who_are_left_is_taken_over(plan: Plan) -> None:
    """No step is lost: replicas, or surviving ranks, hold the complete state."""
    seen = run(plan)
    assert not seen.wrong, f"{seen.wrong}\n{seen.told}"
    taken = seen.told.count("loads: {'step': 4, 'where': 'resilient'}")
    assert taken == plan.world - len(plan.killed), seen.told


INCOMPLETE = {
    "a shard is lost": replace(HANDED["a replica is lost"], replicas=1, every=2),
    "stepped apart": Plan(
        2, (Stroke(1, 0, 5, Fault(What.RAISE, Phase.OPTIMIZER)),), hands_over=True
    ),
    # A rank that caught an exception in its optimizer step reports the step as reached all the
    # same.
    "half-stepped": Plan(
        2, (Stroke(1, 0, 5, Fault(What.CAUGHT_ALONE, Phase.OPTIMIZER)),), hands_over=True
    ),
}


@pytest.mark.parametrize("name", INCOMPLETE)
def test_state_that_is_incomplete_is_not_transferred(name: str) -> None:
    """The ranks load the last checkpoint and log why, except after a half-stepped optimizer."""
    plan = INCOMPLETE[name]
    seen = run(plan)
    assert not seen.wrong, f"{seen.wrong}\n{seen.told}"
    assert "cannot be transferred" in seen.told or name == "half-stepped"
    loaded = seen.told.count("loads: {'step': 4, 'where': 'disk'}")
    assert loaded == plan.world - len(plan.killed), seen.told


def test_a_machine_is_lost_with_its_memory() -> None:
    """Another machine has a copy of its checkpoint in memory, newer than the one on the disk."""
    seen = run(MACHINES)
    assert not seen.wrong, f"{seen.wrong}\n{seen.told}"
    assert seen.told.count("loads: {'step': 6, 'where': 'memory'}") == 2, seen.told


def test_random_plans_are_the_same_again() -> None:
    assert [drawn(0, n) for n in range(200)] == [drawn(0, n) for n in range(200)]
    assert {one.fault.phase for n in range(200) for one in drawn(0, n).strokes} > {Phase.SAVE}
    assert {drawn(0, n).copies for n in range(200)} == {None, 2, 3, 4}
