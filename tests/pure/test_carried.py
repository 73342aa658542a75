"""Units that ranks may skip are gathered and reduced with their carrier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.schedule import AfterForward, MachinePolicy, Op, UnitPolicy
from fullshard.schedule import triggers as when
from fullshard.schedule.triggers import Accumulates, Follows
from tests.pure.walk import Walk

GOLDEN = Path(__file__).parent / "golden" / "carried.txt"
BLOCKS = {2: (0, 1), 5: (3, 4)}
"""Experts inside of each block; the root is unit 6."""
ON_THE_WIRE = (Op.UNSHARD, Op.REDUCE_SCATTER, Op.ALL_REDUCE)

Parts = dict[int, list[int]]
"""The experts that run in each block, in order."""


def sparse(
    policy: UnitPolicy | None = None,
    tolerant: Sequence[int] = (0, 1, 3, 4),
    *,
    copies: bool = False,
) -> Walk:
    """Return a walk of two blocks with two experts each; ranks may skip ``tolerant`` units."""
    policy = policy or UnitPolicy()
    walk = Walk(6, policy=policy, replicated=copies)
    for block in BLOCKS:
        walk.machine.residents.units[block].num_inside = 2
    for unit in tolerant:
        walk.say(when.SetPolicy(unit, replace(policy, skip_tolerant=True)))
    walk.take()
    return walk


def forward(
    walk: Walk, parts: Parts, hidden: Sequence[int] = ()
) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Run the forwards; return each block with its use, and its experts with their uses."""
    ran = []
    for block, experts in parts.items():
        walk.say(when.ForwardEnter(block))
        use = walk.machine.current_use
        inside = [(expert, walk.unit_forward(expert)) for expert in experts]
        follows = Follows.HIDDEN if block in hidden else Follows.BACKWARD
        walk.say(when.ForwardExit(block, follows=follows))
        ran.append((block, use, inside))
    return ran


def step(walk: Walk, parts: Parts, hidden: Sequence[int] = ()) -> None:
    walk.say(when.ForwardEnter(walk.root))
    root_use = walk.machine.current_use
    ran = forward(walk, parts, hidden)
    follows = Follows.HIDDEN if walk.root in hidden else Follows.BACKWARD
    walk.say(when.ForwardExit(walk.root, follows=follows))
    task = walk.new_task()
    walk.say(when.BackwardEnter(walk.root, root_use, task, walk.machine.last_use))
    for block, use, inside in reversed(ran):
        last = max([use, *(number for _, number in inside)])
        walk.say(when.BackwardEnter(block, use, task, last))
        for i, (expert, number) in reversed(list(enumerate(inside))):
            again = expert in [other for other, _ in inside[:i]]
            walk.unit_backward(expert, number, task, last=not again)
        walk.say(when.GradsReady(block, task))
    walk.say(when.GradsReady(walk.root, task))
    walk.say(when.TaskEnd(task))
    walk.say(when.WeightsChanged())


def wire(walk: Walk) -> list[str]:
    """Return the communication since the last call."""
    actions = walk.transcript.actions()
    walk.transcript.events.clear()
    return [str(action) for action in actions if action.op in ON_THE_WIRE]


def test_a_step_as_written_down() -> None:
    walk = sparse()
    step(walk, {2: [1], 5: [4, 3, 4]})
    assert str(walk.transcript) == GOLDEN.read_text()
    assert walk.at_rest


def test_experts_are_gathered_with_their_block_and_reduced_with_it() -> None:
    walk = sparse()
    step(walk, {2: [], 5: [4]})
    walk.take()
    step(walk, {2: [1, 1, 0], 5: []})
    assert wire(walk) == [
        "unshard 6", "unshard 2", "unshard 0", "unshard 1", "unshard 5", "unshard 3", "unshard 4",
        "unshard 5", "unshard 3", "unshard 4", "unshard 2", "unshard 0", "unshard 1",
        "reduce_scatter 5", "reduce_scatter 3", "reduce_scatter 4",
        "reduce_scatter 2", "reduce_scatter 0", "reduce_scatter 1", "reduce_scatter 6",
    ]  # fmt: skip


def test_what_is_inside_of_a_tolerant_unit_moves_with_the_unit_around_both() -> None:
    walk = sparse(tolerant=(2,))
    units = walk.machine.residents.units
    assert [one.key for one in units[6].carries] == [0, 1, 2]
    assert units[3].carrier is units[4].carrier is units[5].carrier is None
    step(walk, {5: [3, 4]})
    assert wire(walk)[:4] == ["unshard 6", "unshard 0", "unshard 1", "unshard 2"]
    walk.say(when.SetPolicy(2, UnitPolicy()))
    assert not units[6].carries
    assert units[2].carrier is None


def parts_of(blocks: Sequence[int]) -> st.SearchStrategy[Parts]:
    runs = {b: st.lists(st.sampled_from(BLOCKS[b]), max_size=4) for b in blocks}
    return st.fixed_dictionaries(runs)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[UnitPolicy, MachinePolicy, list[int], list[list[Parts]]]:
    """Draw policies, the units that may be skipped, and the units that run, by step and rank."""
    policy = UnitPolicy(
        after_forward=draw(st.sampled_from(AfterForward)),
        reshard_after_backward=draw(st.booleans()),
        requires_gradient_sync=draw(st.booleans()),
    )
    budget = st.sampled_from([None, 0, 300, 10_000])
    machine = MachinePolicy(prefetch_budget=draw(budget), reduction_budget=draw(budget))
    tolerant = draw(st.sampled_from([[0, 1, 3, 4], [2, 3, 4], [2, 5], [0, 2, 4, 5]]))
    if draw(st.booleans()) or 2 not in tolerant:
        experts = [e for b in BLOCKS for e in BLOCKS[b] if e in tolerant or b in tolerant]
    else:
        experts = []
    steps = []
    for _ in range(3):
        ranks = []
        alike = {b: [e for e in es if e not in experts] for b, es in BLOCKS.items()}
        for _ in range(2):
            parts = {}
            for block in BLOCKS:
                if block in tolerant and draw(st.booleans()):
                    continue
                free = [e for e in BLOCKS[block] if e in experts]
                some = draw(st.lists(st.sampled_from(free), max_size=4)) if free else []
                parts[block] = alike[block] + some
            ranks.append(parts)
        steps.append(ranks)
    return policy, machine, tolerant, steps


@given(worlds(), st.booleans())
def test_ranks_communicate_alike_whatever_they_run(
    world: tuple[UnitPolicy, MachinePolicy, list[int], list[list[Parts]]], copies: bool
) -> None:
    policy, machine, tolerant, steps = world
    walks = [sparse(policy, tolerant, copies=copies) for _ in range(2)]
    for walk in walks:
        walk.say(when.SetMachinePolicy(machine))
    for ranks in steps:
        for walk, parts in zip(walks, ranks, strict=True):
            step(walk, parts)
        sent = [wire(walk) for walk in walks]
        assert sent[0] == sent[1]
        if policy.requires_gradient_sync:
            for unit in range(7):
                assert sent[0].count(f"reduce_scatter {unit}") == 1
        if policy.reshard_after_backward:
            assert all(walk.at_rest for walk in walks)


def test_a_backward_that_dies_drops_the_gradients_of_all_that_a_unit_carries() -> None:
    walk = sparse()
    walk.say(when.ForwardEnter(walk.root))
    use = walk.machine.current_use
    ((block, block_use, inside),) = forward(walk, {2: [1]})
    walk.say(when.ForwardExit(walk.root))
    task = walk.new_task()
    walk.say(when.BackwardEnter(walk.root, use, task, walk.machine.last_use))
    walk.say(when.BackwardEnter(block, block_use, task, inside[0][1]))
    nested = walk.new_task()
    walk.unit_backward(*inside[0], nested)
    walk.say(when.TaskEnd(nested, (1,)))
    walk.take()
    walk.say(when.TaskDied(task))
    actions = walk.take()
    assert [f"discard {unit}" in actions for unit in (0, 1, 2)] == [True] * 3
    assert walk.at_rest


def test_gradients_that_the_caller_assigns_are_reduced_for_all_that_a_unit_carries() -> None:
    walk = sparse()
    walk.say(when.SetMachinePolicy(MachinePolicy(manual_finalization=True)))
    walk.say(when.ForwardEnter(walk.root))
    use = walk.machine.current_use
    ((block, block_use, _),) = forward(walk, {2: []})
    walk.say(when.ForwardExit(walk.root))
    task = walk.new_task()
    last = walk.machine.last_use
    walk.say(when.BackwardEnter(walk.root, use, task, last, Accumulates.NOWHERE))
    walk.say(when.BackwardEnter(block, block_use, task, last, Accumulates.NOWHERE))
    walk.say(when.TaskEnd(task))
    walk.take()
    walk.say(when.Finalize())
    assert [action for action in walk.take() if action.startswith("reduce_scatter")] == [
        f"reduce_scatter {unit}" for unit in (0, 1, 2, 6)
    ]


def test_a_block_that_backward_does_not_read_is_gathered_for_its_experts() -> None:
    walk = sparse()
    walk.say(when.SetPolicy(2, UnitPolicy(unshard_in_backward=False)))
    for _ in range(2):
        step(walk, {2: [0], 5: []})
        assert wire(walk).count("unshard 0") == 2
        assert walk.at_rest


def test_goes_on_after_a_reset() -> None:
    walk = sparse()
    walk.say(when.ForwardEnter(walk.root))
    walk.say(when.ForwardEnter(2))
    walk.say(when.ForwardEnter(1))
    walk.say(when.Reset())
    assert walk.at_rest
    walk.take()
    step(walk, {2: [1], 5: []})
    assert wire(walk).count("unshard 0") == 2
    assert walk.at_rest


def test_experts_have_secondary_shards_if_they_and_their_block_have() -> None:
    secondary = UnitPolicy(after_forward=AfterForward.SECONDARY)
    walk = sparse(secondary)
    walk.say(when.SetPolicy(0, UnitPolicy(skip_tolerant=True)))
    for _ in range(2):
        step(walk, {2: [0, 1], 5: []})
        actions = walk.take()
        assert "reshard_to_secondary 1" in actions and "reshard_to_secondary 0" not in actions
    walk.say(when.ForwardEnter(walk.root))
    forward(walk, {2: [0]})
    walk.say(when.ForwardExit(walk.root))
    walk.say(when.WeightsChanged())  # no backward: secondary shards are stale
    step(walk, {2: [], 5: []})
    assert walk.at_rest


def test_secondary_shards_that_no_backward_came_to_are_dropped_together() -> None:
    walk = sparse(UnitPolicy(after_forward=AfterForward.SECONDARY))
    walk.say(when.ForwardEnter(walk.root))
    use = walk.machine.current_use
    forward(walk, {2: [0], 5: []})
    walk.say(when.ForwardExit(walk.root))
    assert walk.secondary >= {0, 1, 2}
    task = walk.new_task()
    walk.say(when.BackwardEnter(walk.root, use, task, walk.machine.last_use))
    walk.say(when.TaskEnd(task))
    assert walk.at_rest


@pytest.mark.parametrize(("nbytes", "is_ahead"), [(500, False), (600, True)])
def test_a_budget_counts_all_that_a_unit_carries(nbytes: int, is_ahead: bool) -> None:
    """Three units of a hundred bytes each are held, and three more must fit into the budget."""
    walk = sparse()
    walk.say(when.SetMachinePolicy(MachinePolicy(prefetch_budget=nbytes)))
    step(walk, {2: [0], 5: [3]})
    walk.take()
    walk.say(when.ForwardEnter(walk.root))
    walk.say(when.ForwardEnter(2))
    assert ("unshard 5" in walk.take()) is is_ahead


def test_a_use_that_an_exception_ended_is_not_taken_up_again() -> None:
    walk = sparse()
    walk.say(when.ForwardEnter(walk.root))
    walk.say(when.ForwardEnter(2))
    walk.say(when.ForwardEnter(1))
    ended = walk.machine.current_use
    walk.say(when.ForwardExit(2, failed=True))  # and no exit of unit 1
    walk.say(when.ForwardExit(walk.root, failed=True))
    walk.say(when.ForwardEnter(walk.root))
    ((_, _, ((_, use),)),) = forward(walk, {2: [1]})
    assert use > ended


@given(worlds(), st.sets(st.sampled_from([2, 5, 6])), st.sets(st.sampled_from([2, 5, 6])))
def test_what_a_rank_hides_is_no_matter_to_others(
    world: tuple[UnitPolicy, MachinePolicy, list[int], list[list[Parts]]],
    first: set[int],
    second: set[int],
) -> None:
    """An output may be unused on one rank only, such as that of an expert."""
    policy, machine, tolerant, steps = world
    walks = [sparse(policy, tolerant) for _ in range(2)]
    carriers = {unit.key for unit in walks[0].machine.residents.units.values() if unit.carries}
    for walk in walks:
        walk.say(when.SetMachinePolicy(machine))
    for ranks in steps:
        for walk, parts, hidden in zip(walks, ranks, (first, second), strict=True):
            step(walk, parts, sorted(hidden & carriers))
        assert wire(walks[0]) == wire(walks[1])
    for walk in walks:
        walk.say(when.Reset())
        assert walk.at_rest


def test_what_is_hidden_is_retained_with_all_that_its_carrier_carries() -> None:
    walk = sparse()
    step(walk, {2: [0], 5: []}, hidden=[2])
    assert walk.at_rest
    said = walk.take()
    assert said.count("retain 2") == said.count("retain 0") == said.count("retain 1") == 1
    assert "retain 5" not in said


def test_weights_that_change_in_a_forward_are_gathered_for_all_or_none() -> None:
    walk = sparse()
    walk.say(when.ForwardEnter(walk.root))
    walk.say(when.ForwardEnter(2))
    walk.say(when.WeightsChanged())
    assert walk.say(when.ForwardEnter(1)) == ()


def test_what_the_root_carries_is_in_no_budget() -> None:
    walk = sparse(tolerant=(2,))
    walk.say(when.SetMachinePolicy(MachinePolicy(prefetch_budget=100)))
    step(walk, {2: [], 5: [3]})
    walk.take()
    walk.say(when.ForwardEnter(walk.root))
    assert "unshard 5" in walk.take()
