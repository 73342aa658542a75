"""The scheduler, case by case."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.schedule import AfterForward, Ahead, MachinePolicy, UnitPolicy, UnitState
from fullshard.schedule import triggers as when
from fullshard.schedule.triggers import Follows
from tests.pure.walk import Walk

GOLDEN = Path(__file__).parent / "golden"
SECONDARY = UnitPolicy(AfterForward.SECONDARY)
KEEP = UnitPolicy(after_forward=AfterForward.KEEP)


def counts(actions: list[str]) -> Counter[str]:
    return Counter(action.split()[0] for action in actions)


@pytest.mark.parametrize(
    "name", ["two_steps", "no_sync", "reentrant_checkpoint", "replicas", "secondary", "finalized"]
)
def test_small_model_as_written_down(name: str) -> None:
    policy = SECONDARY if name == "secondary" else UnitPolicy()
    walk = Walk(3, policy=policy, replicated=name == "replicas")
    if name == "no_sync":
        for unit in range(4):
            policy = UnitPolicy(requires_gradient_sync=False)
            walk.say(when.SetPolicy(unit, policy))
        walk.backward(walk.forward())
        for unit in range(4):
            walk.say(when.SetPolicy(unit, UnitPolicy()))
        walk.step()
    elif name == "reentrant_checkpoint":
        checkpointed_step(walk)
    elif name == "finalized":
        finalized_step(walk)
    else:
        walk.step()
        walk.step()
    expected = (GOLDEN / f"{name}.txt").read_text()
    assert str(walk.transcript) == expected


def checkpointed_step(walk: Walk) -> None:
    """Run a step with reentrant checkpoints: no graph, then recompute and nested backward."""
    met = walk.forward(blocks_follow=Follows.NOTHING)
    task = walk.new_task()
    walk.root_backward(met, task)
    for unit, _ in met[1:]:
        use = walk.unit_forward(unit, task=task)
        nested = walk.new_task()
        walk.unit_backward(unit, use, nested)
        walk.say(when.TaskEnd(nested))
    walk.say(when.GradsReady(walk.root, task))
    walk.say(when.TaskEnd(task))


def finalized_step(walk: Walk) -> None:
    """Run two microbatches, the second with gradients set by hand, and one reduction of both."""
    walk.say(when.SetMachinePolicy(MachinePolicy(manual_finalization=True)))
    pends = UnitPolicy(requires_gradient_sync=False, reshard_after_backward=False)
    for unit in range(4):
        walk.say(when.SetPolicy(unit, pends))
    walk.backward(walk.forward())
    walk.autograd_grad(walk.forward())
    for unit in range(4):
        walk.say(when.SetPolicy(unit, UnitPolicy()))
    walk.say(when.Finalize(waits=False))
    walk.say(when.AwaitReductions())


def test_one_gather_each_way_and_one_reduction_a_unit() -> None:
    walk = Walk(5)
    for _ in range(3):
        walk.step()
        actions = walk.take()
        for unit in range(5):
            assert actions.count(f"unshard {unit}") == 2
            assert actions.count(f"reduce_scatter {unit}") == 1
        assert actions.count(f"unshard {walk.root}") == 1
        assert walk.at_rest


def test_kept_units_are_gathered_once() -> None:
    walk = Walk(5, policy=KEEP)
    walk.step()
    walk.step()
    assert counts(walk.take())["unshard"] == 2 * 6
    assert walk.at_rest


def test_the_next_unit_is_gathered_before_this_one_computes() -> None:
    walk = Walk(4)
    walk.step()
    walk.take()
    met = walk.forward()
    assert walk.take()[:9] == [
        "fence", "unshard 4", "wait 4", "unshard 0",
        "wait 0", "unshard 1", "reshard 0", "wait 1", "unshard 2",
    ]  # fmt: skip
    walk.backward(met)
    backward = walk.take()
    order = [a for a in backward if a.split()[0] in ("unshard", "wait", "reduce_scatter")]
    assert order == [
        "unshard 3", "wait 3", "unshard 2", "reduce_scatter 3",
        "wait 2", "unshard 1", "reduce_scatter 2",
        "wait 1", "unshard 0", "reduce_scatter 1",
        "wait 0", "reduce_scatter 0", "reduce_scatter 4",
    ]  # fmt: skip


@pytest.mark.parametrize("num_units", [None, 0, 1, 2])
def test_in_an_unknown_order_a_unit_is_freed_once_the_next_gather_has_begun(
    num_units: int | None,
) -> None:
    """A small budget frees it before the gather; the last unit is freed with the root's forward."""
    walk = Walk(3, nbytes=100)
    if num_units is not None:
        walk.say(when.SetMachinePolicy(MachinePolicy(prefetch_budget=num_units * 100)))
    walk.forward()
    freed_early = num_units in (0, 1)
    enters = ["reshard 0", "unshard 1", "wait 1"] if freed_early else [
        "unshard 1", "reshard 0", "wait 1"
    ]  # fmt: skip
    assert walk.take() == [
        "fence", "unshard 3", "wait 3",
        "unshard 0", "wait 0", "conceal 0",
        *enters, "conceal 1",
        *(action.translate({ord("0"): "1", ord("1"): "2"}) for action in enters), "conceal 2",
        "reshard 2",
    ]  # fmt: skip


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_units_are_resharded_before_their_gradients_take_memory(
    replicated: bool, sync: bool, nested: bool
) -> None:
    """Also after a step with reentrant checkpoints, and for the root before block 0."""
    walk = Walk(3, replicated=replicated, policy=UnitPolicy(requires_gradient_sync=sync))
    if nested:
        checkpointed_step(walk)
    else:
        walk.step()
    walk.take()
    walk.backward(walk.forward())
    actions = walk.take()
    for unit in range(4):
        last_reshard = len(actions) - actions[::-1].index(f"reshard {unit}")
        assert last_reshard <= actions.index(f"{'reduce_scatter' if sync else 'accumulate'} {unit}")
    assert actions.index(f"reshard {walk.root}") < actions.index(
        "reduce_scatter 0" if sync else "accumulate 0"
    )


def test_backward_leaves_a_unit_where_the_gradient_of_its_input_leaves_it() -> None:
    """Its reduction need not wait for the root's remaining backward, such as an embedding's."""
    walk = Walk(2)
    met = walk.forward()
    task = walk.new_task()
    walk.root_backward(met, task)
    for unit, use in met[1:]:
        walk.unit_backward(unit, use, task)
    actions = walk.say(when.BackwardLeave(task, until=met[-1][1] - 1))
    assert [str(action) for action in actions] == [
        "reshard 0",
        "finish_reduce 1",
        "reduce_scatter 0",
    ]
    assert not walk.say(when.BackwardLeave(task, until=met[-1][1] - 1))
    walk.say(when.GradsReady(walk.root, task))
    walk.say(when.TaskEnd(task))
    assert walk.at_rest


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=6),
    st.none() | st.integers(0, 700),
    st.booleans(),
)
def test_reductions_stay_within_their_bytes(
    sizes: list[int], budget: int | None, replicated: bool
) -> None:
    """One reduction always runs; by default only one at a time, as in PyTorch's FSDP2."""
    walk = Walk(len(sizes), replicated=replicated)
    for unit, nbytes in enumerate(sizes):
        walk.machine.residents.units[unit].reduction_nbytes = nbytes
    walk.say(when.SetMachinePolicy(MachinePolicy(reduction_budget=budget)))
    walk.step()
    held: dict[int, int] = {}
    for text in walk.take():
        op, _, unit = text.partition(" ")
        if op == "reduce_scatter":
            held[int(unit)] = ([*sizes, 0])[int(unit)]
            assert len(held) == 1 or (budget is not None and sum(held.values()) <= budget)
        elif op in ("finish_reduce", "all_reduce"):  # an all-reduce holds only a shard
            held.pop(int(unit), None)
    assert walk.at_rest


def test_a_budget_lets_as_many_reductions_run_as_fit() -> None:
    for budget, most in ((0, 1), (100, 1), (200, 2), (299, 2), (300, 3)):
        walk = Walk(6)
        for unit in range(6):
            walk.machine.residents.units[unit].reduction_nbytes = 100
        walk.say(when.SetMachinePolicy(MachinePolicy(reduction_budget=budget)))
        walk.step()
        running = found = 0
        for text in walk.take():
            running += text.startswith("reduce_scatter") - text.startswith("finish_reduce")
            found = max(found, running)
        assert found == most + (budget >= 100)  # the root's has no bytes, and fits as well


def backward_of(
    ahead: Ahead, *, skipped: int | None = None, silent: int | None = None
) -> list[str]:
    """Run a backward of three blocks and a root, without ``skipped``; return its communication."""
    walk = Walk(3)
    walk.say(when.SetMachinePolicy(MachinePolicy(backward_ahead=ahead)))
    met = [(unit, use) for unit, use in walk.forward() if unit != skipped]
    walk.take()
    walk.backward(met, silent=silent)
    assert walk.at_rest
    return [a for a in walk.take() if a.split()[0] in ("unshard", "wait", "reduce_scatter")]


def test_backward_may_gather_ahead_at_the_end_of_a_unit_or_never() -> None:
    assert backward_of(Ahead.AT_END) == [
        "unshard 2", "wait 2", "unshard 1", "reduce_scatter 2",
        "wait 1", "unshard 0", "reduce_scatter 1",
        "wait 0", "reduce_scatter 0", "reduce_scatter 3",
    ]  # fmt: skip
    assert backward_of(Ahead.NEVER) == [
        "unshard 2", "wait 2", "reduce_scatter 2",
        "unshard 1", "wait 1", "reduce_scatter 1",
        "unshard 0", "wait 0", "reduce_scatter 0", "reduce_scatter 3",
    ]  # fmt: skip


@pytest.mark.parametrize("ahead", Ahead)
def test_a_rank_without_gradients_communicates_in_the_same_order(ahead: Ahead) -> None:
    """Also if a unit that was gathered ahead is skipped."""
    for skipped in (None, 1):
        order = communicated(backward_of(ahead, skipped=skipped))
        assert ("unshard 1" in order) == (skipped is None or ahead is not Ahead.NEVER)
        for silent in {0, 1, 2} - {skipped}:
            assert communicated(backward_of(ahead, skipped=skipped, silent=silent)) == order


def communicated(actions: list[str]) -> list[str]:
    return [action for action in actions if not action.startswith("wait")]


def test_replicas_are_reduced_once_a_unit_after_the_shards() -> None:
    walk = Walk(4, replicated=True)
    for _ in range(2):
        walk.step()
        taken = counts(walk.take())
        assert taken["all_reduce"] == taken["reduce_scatter"] == taken["finish_reduce"] == 5
        assert walk.at_rest


def test_partial_gradients_are_reduced_by_the_pass_that_asks_for_it() -> None:
    """Also partial gradients of units that the last backward does not enter."""
    walk = Walk(3, replicated=True)
    for unit in range(4):
        walk.say(when.SetPolicy(unit, UnitPolicy(requires_all_reduce=False)))
    walk.step()
    walk.step(order=[0, 1])
    taken = counts(walk.take())
    assert taken["keep_partial"] == taken["reduce_scatter"] == 4 + 3
    assert not taken["all_reduce"]
    for unit in range(4):
        walk.say(when.SetPolicy(unit, UnitPolicy()))
    walk.step(order=[0])
    taken = counts(walk.take())
    assert taken["reduce_scatter"] == 2
    assert taken["all_reduce"] == taken["finish_reduce"] == 4
    assert walk.at_rest


def test_ranks_agree_on_secondary_shards_if_an_optimizer_steps_in_backward() -> None:
    def backward(*, steps_early: bool) -> list[str]:
        walk = Walk(3, policy=SECONDARY)
        met = walk.forward()
        walk.take()
        task = walk.new_task()
        walk.root_backward(met, task)
        for unit, use in met[1:]:
            walk.unit_backward(unit, use, task)
            if steps_early:
                walk.say(when.WeightsChanged())
        walk.say(when.GradsReady(walk.root, task))
        walk.say(when.TaskEnd(task))
        if not steps_early:
            walk.say(when.WeightsChanged())
        return [*walk.take(), str(walk.machine.residents.generation)]

    early, late = backward(steps_early=True), backward(steps_early=False)
    assert early == late and early[-1] == "1"


def test_secondary_shards_last_until_backward_came_or_cannot_come() -> None:
    walk = Walk(3, policy=SECONDARY)
    met = walk.forward()
    assert walk.secondary == {0, 1, 2, walk.root}
    assert not walk.unsharded
    walk.backward(met)
    assert walk.at_rest
    walk.forward(follows=Follows.NOTHING)
    assert walk.at_rest
    walk.forward()
    walk.say(when.UserReshard(0))
    assert 0 not in walk.secondary
    walk.say(when.WeightsChanged())
    walk.take()
    walk.step()  # stale shards are dropped before the gather
    taken = walk.take()
    assert taken.index("reshard 1") < taken.index("unshard 1")
    assert walk.at_rest


def test_a_skipped_unit_costs_a_gather_and_nothing_stays() -> None:
    walk = Walk(5)
    walk.step()
    walk.take()
    walk.step(order=[0, 1, 3, 4])
    assert walk.at_rest
    actions = walk.take()
    of_2 = [action for action in actions if action.endswith(" 2")]
    assert of_2 == ["unshard 2", "finish_gather 2", "reshard 2"]  # the modules never show it
    walk.step(order=[4, 3, 2, 1, 0])
    assert walk.at_rest
    walk.step(order=[])
    assert walk.at_rest


@pytest.mark.parametrize("budget", [0, 100, 250, 10_000])
def test_prefetching_stays_within_its_bytes(budget: int) -> None:
    walk = Walk(6)
    walk.say(when.SetMachinePolicy(MachinePolicy(prefetch_budget=budget)))
    for _ in range(3):
        walk.step()
    assert walk.most_held <= max(budget, walk.nbytes)
    assert walk.at_rest


def test_a_unit_used_in_a_loop_is_reduced_once() -> None:
    walk = Walk(2)
    walk.step(order=[0, 0, 1, 0])
    walk.take()
    walk.step(order=[0, 0, 1, 0])
    assert counts(walk.take())["reduce_scatter"] == 3
    assert walk.at_rest


def test_several_forwards_before_a_backward() -> None:
    walk = Walk(3)
    first, second = walk.forward(), walk.forward()
    walk.backward(second)
    walk.backward(first)
    assert walk.at_rest
    assert counts(walk.take())["reduce_scatter"] == 2 * 4


def test_without_gradients_everything_is_sharded_after_the_root() -> None:
    walk = Walk(3, policy=KEEP)
    walk.forward(follows=Follows.NOTHING)
    assert walk.at_rest


@pytest.mark.parametrize("policy", [UnitPolicy(), KEEP, SECONDARY], ids=["free", "keep", "few"])
def test_a_hidden_output_changes_nothing_but_what_is_retained(policy: UnitPolicy) -> None:
    """The output may be hidden on one rank only, such as one that logs a norm."""
    said: list[list[str]] = []
    for follows in (Follows.BACKWARD, Follows.HIDDEN):
        walk = Walk(2, policy=policy)
        for _ in range(3):
            walk.backward(walk.forward(follows=follows))
            walk.say(when.WeightsChanged())
        assert walk.at_rest
        said.append(walk.take())
    usual, hidden = said
    assert [action for action in hidden if not action.startswith("retain")] == usual
    assert hidden.count("retain 0") == hidden.count("retain 1") == 3


def test_a_backward_that_keeps_its_graph_retains_the_memory() -> None:
    walk = Walk(1)
    ((_, root), (unit, use)) = walk.forward()
    task = walk.new_task()
    walk.say(when.BackwardEnter(walk.root, root, task, until=use))
    enter = when.BackwardEnter(unit, use, task, until=use, keeps_graph=True)
    assert "retain 0" in [str(action) for action in walk.say(enter)]


def test_what_is_used_twice_is_reduced_when_backward_leaves_its_first_use() -> None:
    """Once per backward, whichever of its uses gives the last gradient, also with retain_graph."""
    for ready in (3, 0):  # the last gradient arrives after the second use, or after the first
        walk = Walk(4)
        met = walk.forward([0, 1, 2, 3, 0])
        for _ in range(2):  # retain_graph
            walk.take()
            task = walk.new_task()
            walk.root_backward(met, task)
            for position, (unit, use) in enumerate(met[1:]):
                last = unit != 0 or position == (4 if ready == 0 else 0)
                walk.unit_backward(unit, use, task, last=last)
            walk.say(when.GradsReady(walk.root, task))
            walk.say(when.TaskEnd(task))
            reduced = [text for text in walk.take() if text.startswith("reduce_scatter")]
            assert reduced == [f"reduce_scatter {unit}" for unit in (3, 2, 1, 0, walk.root)]


def test_forwards_that_get_a_backward_of_their_own_are_reduced_at_once() -> None:
    """Pipelines run several forwards, and then their backwards in the same order."""
    walk = Walk(3)
    forwards = [walk.forward() for _ in range(3)]
    for met in forwards:
        walk.take()
        walk.backward(met)
        actions = walk.take()
        assert actions.index("reduce_scatter 2") < actions.index("reduce_scatter 1")
        assert actions.index("reduce_scatter 1") < actions.index("wait 0")


def test_weights_that_changed_are_gathered_again_in_place() -> None:
    walk = Walk(2, policy=replace(KEEP, reshard_after_backward=False))
    walk.backward(walk.forward())
    assert walk.unsharded == {0, 1, 2}
    walk.take()
    walk.backward(walk.forward())
    assert "unshard 0" not in walk.take()
    walk.say(when.WeightsChanged())
    walk.backward(walk.forward())
    actions = walk.take()
    assert actions.count("unshard 0") == 1
    assert "reshard 0" not in actions


def test_a_dead_backward_leaves_nothing_behind() -> None:
    walk = Walk(3)
    walk.step()
    met = walk.forward()
    task = walk.new_task()
    walk.root_backward(met, task)
    walk.unit_backward(*met[1], task)
    walk.say(when.BackwardEnter(*met[2], task, until=met[2][1]))
    walk.say(when.TaskDied(task, leftovers=(met[2][0],)))
    assert f"discard {met[2][0]}" in walk.take()
    assert walk.at_rest
    walk.step()
    assert walk.at_rest


@pytest.mark.parametrize("inner_exit", [True, False])
def test_a_forward_that_fails_leaves_nothing_behind(inner_exit: bool) -> None:
    walk = Walk(3)
    walk.step()
    walk.say(when.ForwardEnter(walk.root))
    walk.say(when.ForwardEnter(0))
    if inner_exit:
        walk.say(when.ForwardExit(0, follows=Follows.NOTHING, failed=True))
    walk.say(when.ForwardExit(walk.root, follows=Follows.NOTHING, failed=True))
    assert walk.at_rest
    walk.step()
    assert walk.at_rest


def test_reset_gives_up_everything() -> None:
    walk = Walk(3)
    walk.step()
    met = walk.forward()
    walk.root_backward(met, 77)
    actions = [str(action) for action in walk.say(when.Reset())]
    assert all(f"forget {unit}" in actions for unit in range(4))
    assert walk.at_rest
    walk.step()
    assert walk.at_rest


def test_last_backward_decides_when_reductions_end() -> None:
    walk = Walk(2)
    walk.say(when.SetMachinePolicy(MachinePolicy(is_last_backward=False)))
    walk.backward(walk.forward())
    started = counts(walk.take())
    assert started["finish_reduce"] < started["reduce_scatter"]
    walk.say(when.SetMachinePolicy(MachinePolicy()))
    walk.step()
    assert walk.at_rest


def test_a_user_holds_what_he_unsharded() -> None:
    walk = Walk(2)
    walk.say(when.UserUnshard(0))
    walk.say(when.UserWait(0))
    walk.say(when.UserUnshard(0))
    assert walk.take() == ["fence", "unshard 0", "wait 0"]
    walk.say(when.UserReshard(0))
    assert walk.take() == ["reshard 0"]


def test_members_share_a_use_until_all_have_run() -> None:
    walk = Walk(0)
    walk.machine.add(UnitState(1, nbytes=100, num_members=2))
    walk.say(when.ForwardEnter(0))
    walk.say(when.ForwardEnter(1, member=1))
    first = walk.machine.current_use
    walk.say(when.ForwardExit(1, member=1))
    assert 1 in walk.unsharded
    walk.say(when.ForwardEnter(1, member=0))
    assert walk.machine.current_use == first
    assert [str(action) for action in walk.say(when.ForwardExit(1, member=0))] == ["conceal 1"]


@given(
    st.lists(st.sampled_from("fgnsxwdupmqyea"), max_size=25),
    st.integers(0, 3),
    st.sampled_from([KEEP, SECONDARY, UnitPolicy()]),
    st.booleans(),
    st.sampled_from(Ahead),
)
def test_whatever_happens_the_next_step_is_a_good_one(
    happenings: list[str], budget: int, policy: UnitPolicy, replicated: bool, ahead: Ahead
) -> None:
    """Forwards, freed graphs, failures, steps and loads may come in any order."""
    walk = Walk(3, policy=policy, replicated=replicated)
    machine = MachinePolicy(100 * budget if budget else None, backward_ahead=ahead)
    walk.say(when.SetMachinePolicy(machine))
    open_uses: list[list[tuple[int, int]]] = []
    for happening in happenings:
        happen(walk, happening, open_uses)
    for uses in reversed(open_uses):
        walk.backward(uses)
    walk.say(when.UserReshard(0))
    for unit in range(4):
        walk.say(when.SetPolicy(unit, policy))
    if walk.machine.policy.manual_finalization:
        walk.say(when.Finalize())
        assert walk.at_rest and not walk.machine.reductions.open
        walk.say(when.SetMachinePolicy(machine))
    walk.step()
    assert walk.at_rest
    states = walk.machine.residents.units.values()
    assert not any(state.partial or state.pending for state in states)


def happen(walk: Walk, what: str, open_uses: list[list[tuple[int, int]]]) -> None:
    if what == "f":
        open_uses.append(walk.forward())
    elif what == "g":
        open_uses.append(walk.forward(order=[2, 0, 0]))
    elif what == "n":
        walk.forward(follows=Follows.NOTHING)
    elif what == "s" and open_uses:
        walk.backward(open_uses.pop())
    elif what == "x":
        walk.say(when.ForwardEnter(walk.root))
        walk.say(when.ForwardEnter(1))
        walk.say(when.ForwardExit(walk.root, follows=Follows.NOTHING, failed=True))
    elif what == "w":
        walk.say(when.WeightsChanged())
    elif what == "d" and open_uses:
        task = walk.new_task()
        uses = open_uses.pop()
        walk.root_backward(uses, task)
        walk.say(when.TaskDied(task))
    elif what == "p":
        state = walk.machine.residents.units[1]
        change = replace(state.policy, requires_all_reduce=not state.policy.requires_all_reduce)
        walk.say(when.SetPolicy(1, change))
    elif what == "m" and not walk.machine.reductions.open:
        manual = not walk.machine.policy.manual_finalization
        machine = replace(walk.machine.policy, manual_finalization=manual)
        walk.say(when.SetMachinePolicy(machine))
    elif what == "q" and open_uses:
        walk.autograd_grad(open_uses.pop())
    elif what == "y":
        state = walk.machine.residents.units[2]
        sync = not state.policy.requires_gradient_sync
        walk.say(when.SetPolicy(2, replace(state.policy, requires_gradient_sync=sync)))
    elif what in "ea" and walk.machine.policy.manual_finalization:
        walk.say(when.Finalize(waits=what == "e"))
        states = walk.machine.residents.units.values()
        assert not any(s.pending and s.policy.requires_gradient_sync for s in states)
        walk.say(when.AwaitReductions())
        assert not len(walk.machine.reductions)
    elif what == "u":
        walk.say(when.UserUnshard(0))
        walk.say(when.UserWait(0))
