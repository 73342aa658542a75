"""WHEN: the deterministic machine that turns triggers into actions.

The same triggers give the same actions. Nothing here looks at a clock, at free memory or at the
progress of a collective. So all ranks that see the same triggers issue the same collectives in the
same order. A unit is unsharded while something holds it; dropping the last hold reshards it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from fullshard.schedule import triggers as when
from fullshard.schedule.actions import FENCE, Action
from fullshard.schedule.prefetch import Prefetcher
from fullshard.schedule.reductions import Reductions
from fullshard.schedule.residents import Actions, Residents
from fullshard.schedule.state import (
    IN_USE,
    AfterForward,
    Hold,
    Iteration,
    MachinePolicy,
    Residency,
    Task,
    Tasks,
    UnitState,
)
from fullshard.schedule.triggers import NO_TASK, Accumulates, Follows, Trigger

# The holds that end with a unit's backward, whatever the policy.
_BACKWARD_DONE = Hold.BACKWARD | Hold.RECOMPUTE | Hold.USER
_NOT_IN_USE = Hold.KEEP | Hold.USER | Hold.GUESS | Hold.LATE

# Looking up an enum member takes longer than the work that needs the member.
_NOTHING, _READS, _BACKWARD, _HIDDEN = Follows
_NOWHERE, _ELSEWHERE, _HERE = Accumulates


class Scheduler:
    """The machine that answers each trigger with actions.

    The machine keeps residencies, holds and the learned order, never a tensor. ``add`` registers a
    unit; after that ``on`` is the only call. Independent parts are in other files. This class has
    the handlers, one per trigger, which share all of the state.
    """

    def __init__(self) -> None:
        self.residents = Residents()
        self._units = self.residents.units
        self.policy = MachinePolicy()
        self._num_uses = 0
        self._stack: list[tuple[int, int]] = []  # (unit, use), outermost first
        self.iteration: Iteration | None = None  # the forward outside of backward that runs
        self._learned: dict[int, list[int]] = {}  # root -> units in order of entry
        self._ahead = Prefetcher(self.residents)
        self._back = Prefetcher(self.residents)
        self._tasks = Tasks()
        self.reductions = Reductions()
        self._has_new_weights = False  # they changed in a backward that still runs

    def add(self, *units: UnitState) -> None:
        """Register units."""
        self._units.update((unit.key, unit) for unit in units)
        self.residents.regroup()

    def on(self, trigger: Trigger) -> tuple[Action, ...]:
        """Return the actions that follow from ``trigger``, in order."""
        actions: Actions = []
        _HANDLERS[type(trigger)](self, trigger, actions)
        return tuple(actions)

    @property
    def idle(self) -> bool:
        """True if neither a forward nor a backward is under way."""
        return not self._stack and not self._tasks

    @property
    def in_backward(self) -> bool:
        """True if a backward is under way."""
        return bool(self._tasks)

    @property
    def depth(self) -> int:
        """The number of nested forwards that are running."""
        return len(self._stack)

    @property
    def backward_of(self) -> int | None:
        """The unit that backward is inside of; None if there is none."""
        return self._tasks.unit

    @property
    def current_use(self) -> int:
        """The index of the innermost use that is running its forward."""
        return self._stack[-1][1]

    @property
    def last_use(self) -> int:
        """The index of the use that was the last to begin its forward."""
        return self._num_uses - 1

    # forward

    def _forward_enter(self, event: when.ForwardEnter, out: Actions) -> None:
        state = self._units[event.unit]
        outside = event.task == NO_TASK
        if outside and self.iteration is None:
            self._begin_iteration(state, out)
        if not outside:
            self._task(event.task)
        elif state.uses.open is None and state.carrier is None:
            self.residents.refresh(state, out)
        use = state.uses.open
        entered = use is None
        if use is None:
            use = self._num_uses
            state.uses.enter(use)
            self._num_uses += 1
        self._stack.append((event.unit, use))
        if state.carrier is not None:
            return  # it is unsharded, and other ranks may not run it
        state.holds |= Hold.FORWARD
        self.residents.make_room(state, self.policy.prefetch_budget, out)
        self.residents.need(state, out)
        if self.iteration and outside and entered:
            self.iteration.entered.append(event.unit)
            told = state.policy.forward_prefetch
            self._ahead.met(event.unit, self.policy.prefetch_budget, out, told=told)

    def _begin_iteration(self, root: UnitState, out: Actions) -> None:
        self.iteration = Iteration(root.key)
        self.residents.root = root
        self._ahead.follow(self._learned.get(root.key, ()))
        out.append(FENCE)

    def _forward_exit(self, event: when.ForwardExit, out: Actions) -> None:
        state = self._units[event.unit]
        while self._stack and self._stack.pop()[0] != event.unit:
            pass  # inner uses that an exception ended without a ``ForwardExit``
        if any(unit == event.unit for unit, _ in self._stack):
            return  # the unit called itself; the exit of the outer call ends the use
        uses = state.uses
        if state.carrier is not None:
            uses.open = None
            return
        outside = event.task == NO_TASK
        if event.follows >= _BACKWARD and not event.failed and uses.open is not None:
            if outside:
                uses.forget_past(self.residents.generation)
                if event.follows is _HIDDEN:
                    self.residents.retain(state, out)
            uses.graphs[uses.open] = 0
        if uses.ran(event.member) or event.failed or not outside:
            self._close_use(state, event, out)
        iteration = self.iteration
        if iteration and outside:
            iteration.left.append(event.unit)
            if not self._stack:
                self._end_iteration(iteration, event, out)

    def _close_use(self, state: UnitState, event: when.ForwardExit, out: Actions) -> None:
        """Close the use after its forward: replace its hold by the holds that follow a forward."""
        if state.uses.open is None:
            return
        state.uses.open = None
        for one in state.carries:
            one.uses.open = None
        outside = event.task == NO_TASK
        is_root = self.iteration is not None and self.iteration.root == state.key
        if not outside:
            self._task(event.task).recomputed.add(state.key)
            state.holds |= Hold.RECOMPUTE
        elif not event.failed and (event.follows is _READS or state.policy.keeps(is_root)):
            state.holds |= Hold.KEEP
        else:
            state.holds &= ~Hold.USER
        state.holds &= ~Hold.FORWARD
        returns = outside and event.follows >= _BACKWARD and not event.failed
        to_secondary = returns and state.policy.after_forward is AfterForward.SECONDARY
        if outside and self._ahead.is_blind:
            self.residents.put_off(state, out, to_secondary=to_secondary)
        self.residents.settle(state, out, to_secondary=to_secondary)

    def _end_iteration(self, iteration: Iteration, event: when.ForwardExit, out: Actions) -> None:
        """End the iteration: the root has left its forward."""
        used = [self._units[key] for key in dict.fromkeys(iteration.entered)]
        for state in used:
            self._close_use(state, event, out)  # still open if a member of the unit never ran
        self._ahead.give_up(out)
        self.residents.end_late(out)
        self.iteration = None
        if event.failed or event.follows < _BACKWARD:
            # If units stayed unsharded, optimizers and checkpoints would find unknown parameters.
            for state in used:
                self.residents.release(state, Hold.KEEP | Hold.USER, out)
        else:
            left = (self._units[key] for key in reversed(iteration.left))
            self._back.follow([u.key for u in left if u.policy.unshard_in_backward or u.carries])
        if not event.failed:
            self._learned[iteration.root] = iteration.entered

    # backward

    def _backward_enter(self, event: when.BackwardEnter, out: Actions) -> None:
        state = self._units[event.unit]
        task = self._task(event.task)
        self._leave_younger(task, event.task, event.until, out)
        if event.use in task.open_uses or state.carrier is not None:
            return
        task.open_uses[event.use] = event.unit
        if event.use in state.uses.graphs:
            state.uses.graphs[event.use] += 1
        task.entered[event.unit] = None
        if event.accumulates is _NOWHERE:
            task.dealt_with.add(event.unit)
            if self.policy.manual_finalization:
                for one in (state, *state.carries):
                    one.pending = True  # the caller may assign the results to ``.grad`` by hand
        elif event.accumulates is _ELSEWHERE and event.unit not in task.dealt_with:
            task.due.add(event.unit)
        if event.keeps_graph:
            self.residents.retain(state, out)
        state.holds = state.holds & ~Hold.RECOMPUTE | Hold.BACKWARD
        if state.policy.unshard_in_backward or state.carries:
            self.residents.need(state, out)
        self._back.met(
            event.unit,
            self.policy.prefetch_budget,
            out,
            told=state.policy.backward_prefetch,
            ahead=self.policy.backward_ahead,
        )

    def _leave_younger(self, task: Task, number: int, until: int, out: Actions) -> None:
        """Leave all uses above ``until``, the youngest first, which is the same on every rank.

        Reshard their units first, then start reductions, which take memory.
        """
        if not task.open_uses or max(task.open_uses) <= until:
            return
        left: list[tuple[int, UnitState]] = []
        for use in sorted((use for use in task.open_uses if use > until), reverse=True):
            state = self._units[task.open_uses.pop(use)]
            if not task.is_inside(state.key) and self._tasks.around(state.key, number) is None:
                self._leave_unit(state, out)
                self._back.done(state.key, self.policy.prefetch_budget, out)
                left.append((use, state))
        for use, state in left:
            if state.key in task.due and state.uses.is_earliest(use):
                self._reduce(state, task, out)

    def _leave_unit(self, state: UnitState, out: Actions) -> None:
        """Drop the holds of backward: nothing in the task reads the unit any more."""
        state.holds &= ~_BACKWARD_DONE
        if state.policy.reshard_after_backward:
            state.holds &= ~Hold.KEEP
        elif state.residency is Residency.UNSHARDED:
            state.holds |= Hold.KEEP
        self.residents.settle(state, out)

    def _backward_leave(self, event: when.BackwardLeave, out: Actions) -> None:
        if event.task in self._tasks:
            self._leave_younger(self._tasks[event.task], event.task, event.until, out)

    def _grads_ready(self, event: when.GradsReady, out: Actions) -> None:
        """Mark the unit as due: reduce it when backward leaves its earliest use.

        Reducing now would be too early: the rest of the unit's backward may read the parameters,
        whose memory should be freed before the reduction takes some. Ranks would not agree on the
        moment either. If other units run between the calls of this unit, its last gradient may come
        before, between or after theirs; this depends on how each rank uses its parameters.
        """
        carrier = self._units[event.unit].carrier
        unit = event.unit if carrier is None else carrier.key
        outer = self._tasks.around(unit, event.task)
        (outer or self._task(event.task)).due.add(unit)

    def _task_end(self, event: when.TaskEnd, out: Actions) -> None:
        task = self._tasks.pop(event.task, None) or Task(self._num_uses)
        task.due.update(self.residents.leading(key).key for key in event.leftovers)
        self._leave_younger(task, event.task, -1, out)
        touched = dict.fromkeys((*task.entered, *sorted(task.dealt_with | task.due)))
        ended: list[UnitState] = []
        for key in touched:
            outer = self._tasks.around(key, event.task)
            if outer is not None:
                outer.due.add(key)
                continue
            state = self._units[key]
            ended.append(state)
            if state.residency:  # if sharded, the unit was left before
                self._leave_unit(state, out)
        for state in ended:
            if state.key in task.due or state.key not in task.dealt_with:
                self._reduce(state, task, out)
        for state in map(self._units.__getitem__, sorted(task.recomputed)):
            state.uses.forget_from(task.first_use)
            self.residents.release(state, Hold.RECOMPUTE, out)
        if not self._tasks:
            self._end_backward(out)

    def _finalize(self, event: when.Finalize, out: Actions) -> None:
        for state in self._units.values():
            if state.policy.reshard_after_backward:
                self.residents.release(state, Hold.KEEP | Hold.USER, out)
        self._reduce_waiting(out)
        if event.waits:
            self.reductions.finish(out)
        else:
            self.reductions.leave()

    def _await_reductions(self, event: when.AwaitReductions, out: Actions) -> None:
        self.reductions.finish(out)

    def _reduce_waiting(self, out: Actions) -> None:
        for state in self._units.values():
            self.reductions.start_waiting(state, out, self.policy.reduction_budget)

    def _end_backward(self, out: Actions) -> None:
        """End the backward: the outermost task has ended."""
        manual = self.policy.manual_finalization
        self._back.give_up(out)
        if self.iteration is None:  # if set, a forward that called backward is still running
            for state in self._units.values():
                # Kept for a backward that never came; if it comes later, gather the unit again.
                if state.residency and state.policy.reshard_after_backward:
                    self.residents.release(state, Hold.KEEP, out)
        if not manual:
            self._reduce_waiting(out)
        if self.policy.is_last_backward and not manual:
            self.reductions.finish(out)
        self._take_new_weights()

    def _task_died(self, event: when.TaskDied, out: Actions) -> None:
        task = self._tasks.pop(event.task, None) or Task(0)
        due = sorted(task.due)  # a nested task may have left units here
        for state in map(self._units.__getitem__, dict.fromkeys((*event.leftovers, *due))):
            out.extend(one.do.discard for one in (state, *state.carries))
        if self._tasks:
            others = self._tasks.values()  # else nothing would free what the dead task was in
            for key in sorted({*task.open_uses.values(), *task.recomputed}):
                if not any(one.is_inside(key) for one in others):
                    self._leave_unit(self._units[key], out)
            return
        self._back.give_up(out)
        self.reductions.finish(out)
        for state in self.residents.units.values():
            if not state.holds & Hold.FORWARD:
                self.residents.release(state, _BACKWARD_DONE | Hold.KEEP, out)
        self._take_new_weights()

    def _reduce(self, state: UnitState, task: Task, out: Actions) -> None:
        task.dealt_with.add(state.key)
        task.due.discard(state.key)
        self.reductions.start(state, out, self.policy.reduction_budget)
        for one in state.carries:
            self.reductions.start(one, out, self.policy.reduction_budget)

    def _task(self, number: int) -> Task:
        task = self._tasks.get(number)
        if task is None:
            if not self._tasks:
                self._back.rewind()
                self.reductions.open = True
            task = self._tasks[number] = Task(self._num_uses)
        return task

    # the user

    def _user_unshard(self, event: when.UserUnshard, out: Actions) -> None:
        state = self.residents.leading(event.unit)
        state.holds |= Hold.USER
        self.residents.begin(state, out, fence=self.idle)

    def _user_wait(self, event: when.UserWait, out: Actions) -> None:
        state = self.residents.leading(event.unit)
        if state.residency is Residency.GATHERING:
            self.residents.begin(state, out, fence=self.idle)
        if state.residency in (Residency.GATHERING, Residency.CONCEALED):
            self.residents.wait(state, out)

    def _user_reshard(self, event: when.UserReshard, out: Actions) -> None:
        state = self.residents.leading(event.unit)
        self.residents.release(state, Hold.USER if state.holds & IN_USE else _NOT_IN_USE, out)

    def _weights_changed(self, event: when.WeightsChanged, out: Actions) -> None:
        self._has_new_weights = True
        if not self._tasks:
            self._take_new_weights()

    def _take_new_weights(self) -> None:
        """Count a change of weights; during a backward put it off.

        An optimizer may step in hooks of gradients, which ranks call at different moments. But
        all ranks must gather alike: from secondary shards, or from all.
        """
        self.residents.generation += self._has_new_weights
        self._has_new_weights = False

    def _set_policy(self, event: when.SetPolicy, out: Actions) -> None:
        state = self._units[event.unit]
        before, state.policy = state.policy, event.policy
        if before.skip_tolerant is not event.policy.skip_tolerant:
            self.residents.regroup()

    def _set_machine_policy(self, event: when.SetMachinePolicy, out: Actions) -> None:
        self.policy = event.policy

    def _forget(self, event: when.Forget, out: Actions) -> None:
        state = self._units[event.unit]
        state.pending = state.partial = False
        out.append(state.do.forget)

    def _reset(self, event: when.Reset, out: Actions) -> None:
        self._stack.clear()
        self._tasks.clear()
        self._take_new_weights()
        self.iteration = None
        self._learned.clear()  # ranks interrupted at different places learned different orders
        for guesses in (self._ahead, self._back):
            guesses.give_up(out)
            guesses.follow(())
        self.reductions.finish(out)
        self.residents.end_late(out)
        for state in self.residents.units.values():
            state.uses.open = None
            state.uses.graphs.clear()
            state.pending = state.partial = False
            self.residents.release(state, ~Hold.CARRIED, out)
            out.append(state.do.forget)


_HANDLERS: dict[type, Callable[[Scheduler, Any, Actions], None]] = {
    kind: getattr(Scheduler, f"_{when.kind_of(kind)}") for kind in get_args(Trigger)
}
