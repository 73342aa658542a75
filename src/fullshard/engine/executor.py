"""The engine: reports triggers to the scheduler and carries out the actions that it answers."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from fullshard import watch
from fullshard._torch import autograd as _autograd
from fullshard.device import Lane, Lanes, StorageMeter, make_lanes
from fullshard.engine.autograd import Backward, Use
from fullshard.engine.bucket import Bucket
from fullshard.engine.reduce import Gradients, resolve_presence
from fullshard.engine.steps import StepLog
from fullshard.engine.unit import Retained, Unit, check_lent_alike
from fullshard.errors import BusyError, PeerError, ProtocolError, TornStepError
from fullshard.schedule import (
    IN_USE,
    Action,
    Event,
    Hold,
    MachinePolicy,
    Observer,
    Op,
    Recorder,
    Residency,
    Scheduler,
    UnitPolicy,
)
from fullshard.schedule import triggers as when
from fullshard.schedule.triggers import NO_TASK, Follows, Trigger
from fullshard.tensors import unchecked

log = logging.getLogger("fullshard")


class Engine:
    """The engine of one tree of modules: its units, one scheduler and one set of lanes.

    Each call of ``fully_shard`` joins the engines of the units below, so that in the end the root's
    engine runs all units, whichever of them runs forward first.

    Three parts, in this order: changes between steps, the forward and the step, and the actions
    of the scheduler.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        policies: Sequence[UnitPolicy],
        machine: MachinePolicy | None = None,
    ) -> None:
        self.units = list(units)
        self.scheduler = Scheduler()
        self.scheduler.policy = machine or MachinePolicy()
        self.meter = StorageMeter()
        self.observer: Observer | None = None
        self.recorder: Recorder | None = None
        self.post_optim_event: Any = None  # if set, the next fence waits for it, not for compute
        self.is_dry = False
        self.steps = StepLog(self.shares_params, self.weights_changed, self._drop_step)
        self.backward = Backward(self.trigger, self._is_in_forward_elsewhere)
        self._lanes: Lanes | None = None
        self._uses: dict[int, Use] = {}  # the last use of each unit
        self._unread: list[Gradients] = []  # presence flags to be read once backward has ended
        self.retained = Retained(self.scheduler)
        for key, unit in enumerate(units):
            unit.key, unit.engine = key, self
        self.scheduler.add(*map(Unit.state, units, policies))
        watch.begin()

    @classmethod
    def join(cls, engines: Iterable[Engine], unit: Unit, policy: UnitPolicy) -> Engine:
        """Return one engine for the units of ``engines``, in their order, and ``unit``.

        Raises:
            ProtocolError: one of the engines is not idle, see ``check_idle``.
        """
        units: list[Unit] = []
        policies: list[UnitPolicy] = []
        machine = MachinePolicy()
        for engine in dict.fromkeys(engines):
            engine.check_idle(f"fully_shard({unit.name or 'the root'})")
            engine.end_reductions()
            engine.weights_changed()  # no backward of an earlier forward can come any more
            engine.reshard_all()
            engine.steps.close()
            key_of = {inner.key: len(units) + i for i, inner in enumerate(engine.units)}
            units += engine.units
            policies += [engine.policy_of(inner).renumbered(key_of) for inner in engine.units]
            machine = machine.joined(engine.scheduler.policy)
        for inner in units:
            for bucket in inner.buckets:
                bucket.dematerialize()
        return cls([*units, unit], [*policies, policy], machine)

    def check_idle(self, what: str) -> None:
        """Raise in the middle of a forward, a backward, a loan or an awaited reduction.

        Raises:
            ProtocolError: a ``BusyError``, except for an awaited reduction.
        """
        self.check_not_running(what)
        self.check_awaited(what)
        for unit in self.units:
            unit.check_not_lent(what)

    def reshard_all(self) -> None:
        """Reshard every unit that nothing uses."""
        for unit in self.units:
            self.reshard(unit)

    def reshard(self, unit: Unit) -> None:
        """Reshard ``unit`` if nothing uses it."""
        self.trigger(when.UserReshard(unit.key))

    def end_reductions(self) -> None:
        """End the reductions in flight: set the reduced gradients before the shards change."""
        if len(self.scheduler.reductions):
            self.trigger(when.AwaitReductions())

    def reduce_now(self) -> None:
        """Reduce the gradients of all units, as the end of a backward does.

        For callers that assign gradients themselves, without a backward that we see.
        """
        self.trigger(when.TaskEnd(NO_TASK, tuple(unit.key for unit in self.units)))

    def set_policy(self, unit: Unit, policy: UnitPolicy) -> None:
        """Set the policy of ``unit`` from now on."""
        self.trigger(when.SetPolicy(unit.key, policy))

    def weights_changed(self) -> None:
        """Mark unsharded copies as stale: sharded parameters may have new values."""
        self.trigger(when.WeightsChanged())

    def keep_memory(self, unit: Unit, keep: bool) -> None:
        """Set whether ``unit`` keeps the memory of its unsharded parameters when resharded."""
        is_sharded = self.scheduler.residents.units[unit.key].residency is Residency.SHARDED
        for bucket in unit.buckets:
            bucket.keeps_memory = keep
            if is_sharded and not keep:
                bucket.reshard(retained=unit in self.retained)

    def policy_of(self, unit: Unit) -> UnitPolicy:
        """Return the user's choices for ``unit``."""
        return self.scheduler.residents.units[unit.key].policy

    def shares_params(self, optimizer: Optimizer) -> bool:
        """Return whether ``optimizer`` steps some parameters of the engine."""
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        params = (p for unit in self.units for b in unit.buckets for p in b.stepped_params)
        return any(id(param) in stepped for param in params)

    @property
    def is_running(self) -> bool:
        """True in the middle of a forward or a backward."""
        return not self.scheduler.idle or _autograd.current_task() != NO_TASK

    def backward_is_over(self) -> bool:
        """Wait for the end of a backward that this thread is not in, and return whether it came.

        Return True without waiting inside of a forward or a backward.
        """
        if _autograd.current_task() != NO_TASK or self.scheduler.iteration is not None:
            return True
        return self.backward.are_over()

    def check_not_running(self, what: str) -> None:
        """Raise ``BusyError`` in the middle of a forward or a backward."""
        if not self.backward_is_over() or self.is_running:
            raise BusyError(
                f"{what} was called in the middle of a forward or a backward of the model; "
                "call it between steps, or call reset_iter_state() on the root after an exception"
            )

    def check_awaited(self, what: str) -> None:
        """Raise ``ProtocolError`` while reductions wait for a handle to end them."""
        if self.scheduler.reductions.awaited is not None:
            raise ProtocolError(
                f"{what} was called before wait() of the handle that "
                "finalize_backward(async_op=True) returned"
            )

    def forget_interrupted(self, unit: Unit) -> None:
        """Clear the record of an interrupted step if ``unit`` is the root, which was loaded."""
        if unit is self.units[-1]:
            self.steps.forget_interrupted()

    def trigger(self, trigger: Trigger) -> None:
        """Pass ``trigger`` to the scheduler, then carry out its actions; one thread at a time."""
        with unchecked(self.backward.lock):
            if self.backward.dead and type(trigger) is not when.TaskDied:
                self.backward.report_dead()
            self._hear(trigger)

    def _hear(self, trigger: Trigger) -> None:
        if self._lanes is not None:
            self._lanes.track_stream()
        if type(trigger) is when.TaskDied:
            last = self.scheduler.backward_of
            where = "" if last is None else f" of unit {self.units[last].shown_name}"
            self.steps.step.left(f"in {'the' if where else 'a'} backward{where}")
        actions = self.scheduler.on(trigger)
        if self.recorder is not None:
            self.recorder.record(Event(trigger, actions))
        if type(trigger) in _ENDS:
            self._end(type(trigger), actions)
        elif actions:
            self.act_all(actions, to_the_end=False)
        if type(trigger) is when.UserReshard:
            self.retained.free()

    def _end(self, kind: type[Trigger], actions: Sequence[Action]) -> None:
        """Carry out all ``actions`` of a trigger that ends something, then end the step with it."""
        step = self.steps.step
        failed, error, was_open = kind is when.TaskDied, None, step.is_open
        try:
            self.act_all(actions, to_the_end=True)
            if not self.scheduler.in_backward:
                self.retained.free(at_once=kind is when.Reset)
        except BaseException as raised:
            if not isinstance(raised, ProtocolError):  # which all ranks raise
                failed, error = True, raised
                step.left("at the end of a backward")
            raise
        finally:
            if kind is when.Reset:
                step.drop()
            elif not self.scheduler.in_backward and (failed or kind is when.TaskEnd):
                self.steps.end(error, failed=failed, trained=not failed)
        if was_open and kind is when.TaskEnd:
            step.era.check()  # the others drop this step, and raise

    def run_dry(self, lanes: Lanes) -> None:
        """Run from now on with parameters on the meta device, on ``lanes`` where nothing happens.

        To be called after the last unit was made, and before the first forward.
        """
        self._lanes = lanes
        self.is_dry = True

    def share_lanes(self, other: Engine) -> None:
        """Issue communication on the lanes of ``other``, so that both engines take turns."""
        if self.lanes is other.lanes:
            return
        self.reset_wires(self.units)
        self._lanes = other.lanes

    def reset_wires(self, units: Iterable[Unit]) -> None:
        """Forget the unsharded side of ``units``, which was made for wires or lanes that change.

        Raises:
            ProtocolError: the engine is not idle, see ``check_idle``.
        """
        self.check_idle("changing how a sharded module communicates")
        self.end_reductions()
        self.weights_changed()
        for unit in units:
            self.reshard(unit)
            for bucket in unit.buckets:
                bucket.dematerialize()

    @property
    def lanes(self) -> Lanes:
        """The lanes of the units' device, made on first access."""
        if self._lanes is None:
            self._lanes = make_lanes(self.units[-1].device)
        return self._lanes

    # forward and step

    def enter(self, unit: Unit, member: int, inputs: Iterable[Tensor]) -> None:
        """Enter the forward of ``member`` of ``unit``, which is about to run on ``inputs``.

        Raises:
            ProtocolError: parameters are on the meta device or lent to the first rank, a handle
                still awaits reductions, or the unit's carrier is not running; nothing was changed.
            BusyError: another thread is in a forward or a backward; nothing was changed.
        """
        if self.backward.tasks and not self.backward_is_over():
            raise BusyError(
                f"a forward of unit {unit.shown_name} was called while another thread is in a "
                "backward of the model. Call it when that backward has ended"
            )
        with unchecked(self.backward.lock):
            self.check_awaited("a forward")
            carrier = self.scheduler.residents.units[unit.key].carrier
            if carrier is not None and not carrier.holds & IN_USE:
                raise unit.called_outside(self.units[carrier.key])
            task = self.backward.task()
            if task == NO_TASK:  # otherwise a thread of autograd, in which no optimizer steps
                if self._is_in_forward_elsewhere():
                    raise BusyError(
                        f"a forward of unit {unit.shown_name} was called while another thread is "
                        "in a forward of the model. Call the model from one thread at a time"
                    )
                self.steps.thread = threading.get_ident()
            else:
                unit.sync_requires_grad()  # another forward may have run with parameters frozen
            if self.scheduler.idle:
                self.retained.free()
                check_lent_alike(self.units, "a forward")
                self.prepare(self.units)
                if task == NO_TASK:
                    self.steps.begin()
            try:
                self.trigger(when.ForwardEnter(unit.key, member, task))
            except BaseException:
                self._exit(unit, member, Follows.NOTHING, failed=True)
                raise
            number = self.scheduler.current_use
            use = self._uses.get(unit.key)
            if use is not None and use.number == number:
                use.begin(inputs)
                return
            use = self._uses[unit.key] = Use(self.backward, unit, number)
            use.begin(inputs)
            if task == NO_TASK:
                use.watch()

    def exit(self, unit: Unit, member: int, outputs: Iterable[Tensor], *, failed: bool) -> None:
        """Exit the forward of ``member`` of ``unit``, which ended or was left by an exception."""
        with unchecked(self.backward.lock):
            use = self._uses.get(unit.key)
            if use is None or not use.running:
                return  # another hook failed before ours, so the member never entered
            outside = _autograd.current_task() == NO_TASK
            if outside and self._is_in_forward_elsewhere():
                return  # it was refused
            inside = self.units if unit.num_inside else [unit]
            follows = use.end(() if failed else outputs, self.scheduler.last_use, inside)
            if failed:
                follows = Follows.NOTHING
            if follows is Follows.HIDDEN and outside:
                self.retained.warn(unit)
            self._exit(unit, member, follows, failed=failed)

    def _is_in_forward_elsewhere(self) -> bool:
        """Return whether another thread, which still lives, is in a forward outside of backward."""
        if self.scheduler.iteration is None or self.steps.thread == threading.get_ident():
            return False
        return any(thread.ident == self.steps.thread for thread in threading.enumerate())

    def _exit(self, unit: Unit, member: int, follows: Follows, *, failed: bool) -> None:
        task = _autograd.current_task()
        if failed and not _autograd.ends_recomputation(sys.exception()):
            self.steps.step.left(f"in the forward of unit {unit.shown_name}")
        self.trigger(when.ForwardExit(unit.key, member, task, follows, failed))
        if self.scheduler.idle and task == NO_TASK:
            self.steps.step.expects_backward |= follows >= Follows.BACKWARD
            if failed or not self.steps.step.expects_backward:
                self.steps.end(sys.exception(), failed=failed)

    def _drop_step(self) -> None:
        """Drop all gradients and start over, as all ranks do after a fault on one of them."""
        try:
            self.trigger(when.Reset())
        except (PeerError, ProtocolError, TornStepError) as error:
            # Collectives in flight never end.
            log.debug("after a fault: %s", error)
        self._unread.clear()
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.drop_gradients()

    def prepare(self, units: Iterable[Unit]) -> None:
        """Adopt changes of parameters between steps, and refuse units that cannot run.

        Raises:
            ConfigError: parameters were replaced, moved or cast in a way that cannot work.
            ProtocolError: parameters are on the meta device.
        """
        with torch.inference_mode(False):  # new shards must be trainable
            for unit in units:
                if not unit.is_lent:
                    self.take_over(unit)
                    unit.check_ready(with_memory=not self.is_dry)
                    unit.sync_requires_grad()

    def rewritten(self, unit: Unit) -> None:
        """Mark copies of ``unit`` as stale after writes to its shards that nothing else notices.

        If the user unsharded the unit, gather it again at once, because the modules show it. A copy
        that waits for a backward stays, because it belongs to the weights of its forward.
        """
        self.weights_changed()
        state = self.scheduler.residents.leading(unit.key)
        if state.residency is Residency.UNSHARDED and state.holds == Hold.USER:
            self.trigger(when.UserUnshard(unit.key))
            self.trigger(when.UserWait(unit.key))

    def take_over(self, unit: Unit) -> None:
        """Adopt parameters that were replaced, moved, cast or written since the last step."""
        unit.registration.take_over(unit)
        self._adopt(unit)

    def moved(self, unit: Unit, *, partly: bool) -> None:
        """Adopt parameters that ``nn.Module._apply`` moved or cast.

        ``partly``: only a part of the unit may have been moved so far, which is no error yet.
        """
        unit.registration.take_over(unit, keeps_ties=True)
        if not (partly and any(bucket.differs() for bucket in unit.buckets)):
            self._adopt(unit)

    def _adopt(self, unit: Unit) -> None:
        state = self.scheduler.residents.units[unit.key]
        stale = [bucket for bucket in unit.buckets if not bucket.is_current()]
        if stale:
            self.end_reductions()
            self.trigger(when.WeightsChanged())
            self.trigger(when.UserReshard(unit.key))
            for bucket in stale:
                bucket.adopt()
            unit.was_written()  # the adopted values include these writes
            state.nbytes = unit.nbytes
            state.reduction_nbytes = unit.reduction_nbytes
        elif unit.was_written() and state.residency:
            self.trigger(when.WeightsChanged())

    # actions

    def act_all(self, actions: Sequence[Action], *, to_the_end: bool) -> None:
        """Carry out ``actions`` in order; ``to_the_end``: all of them, even if one fails.

        The scheduler never repeats the actions that end a forward or backward. Once another
        rank may be gone, the actions that communicate are skipped. Gradients of skipped and failed
        actions are dropped: nothing may add them to those of a later backward. The first failure
        is raised at the end.
        """
        if not actions:
            return
        failure: Exception | None = None
        is_apart = False  # True: another rank may be gone
        act = self._act if self.observer is None else self._act_observed
        with torch.no_grad(), _autograd.outside_of_transforms():
            for action in actions:
                if not is_apart or action.op.is_local:
                    try:
                        act(action)
                        continue
                    except Exception as error:
                        if not to_the_end:
                            raise
                        failure = failure or error
                        is_apart = not isinstance(failure, ProtocolError)
                if action.unit is not None:
                    for gradients in self.units[action.unit].gradients():
                        gradients.abandon()
            if self._unread and (is_apart or not self.scheduler.in_backward):
                unread, self._unread = self._unread, []
                for gradients in unread if is_apart else ():
                    gradients.abandon()
                resolve_presence(dict.fromkeys(unread), self.lanes)
            if failure is not None:
                raise failure
            if to_the_end and self.scheduler.idle:
                # a CUDA graph of a step must end with lanes joined
                self.lanes.join(Lane.COMPUTE, Lane.GATHER)

    def _act_observed(self, action: Action) -> None:
        assert self.observer is not None
        with self.observer.acting(action):
            self._act(action)

    def _act(self, action: Action) -> None:
        if action.unit is None:
            self._fence()
            return
        unit = self.units[action.unit]
        if not _autograd.is_profiling():
            self._carry_out(action.op, unit)
            return
        with record_function(f"fullshard::{action.op.value} {unit.shown_name}"):
            self._carry_out(action.op, unit)

    def _carry_out(self, op: Op, unit: Unit) -> None:
        act = _ACTS[op]
        if op.starts:
            self.steps.run(act, self, unit)
        else:
            act(self, unit)
        if op.takes_gradients:
            self.backward.reduced(unit)
        elif op.gives_gradients:
            self._unread += [one for one in unit.gradients() if one.unread_flags is not None]

    def _fence(self) -> None:
        """Make gathers wait for the values that the optimizer wrote."""
        event, self.post_optim_event = self.post_optim_event, None
        if event is None:
            self.lanes.join(Lane.GATHER, Lane.COMPUTE)
        else:
            self.lanes.wait_event(Lane.GATHER, event)
        if not len(self.scheduler.reductions):  # their memory may belong to an earlier stream
            self.lanes.untrack_streams()


def _unshard(engine: Engine, unit: Unit, *, is_retry: bool = False) -> None:
    """Start all gathers, or with ``is_retry`` those that failed; make missing unsharded sides."""
    for bucket in unit.buckets:
        if not bucket.is_materialized:
            _materialize(engine, unit, bucket)
    if engine.scheduler.idle:  # the user unshards; otherwise a root has just prepared the units
        unit.was_written()
    for bucket in unit.buckets:
        if not (is_retry and bucket.is_gathered):
            bucket.materialized.start()


def _materialize(engine: Engine, unit: Unit, bucket: Bucket) -> None:
    fresh = bucket.materialize(engine.lanes, engine.meter)
    engine.backward.watch(unit, fresh.params)
    bucket.sync_requires_grad()


def _wait(engine: Engine, unit: Unit) -> None:
    """Make the unsharded parameters usable and show them in the modules."""
    if not all(bucket.is_gathered for bucket in unit.buckets):  # starting some has failed
        engine.steps.run(partial(_unshard, is_retry=True), engine, unit)
    for bucket in unit.buckets:
        bucket.materialized.finish()
    unit.registration.show_unsharded(unit.buckets)


def _finish_gather(_: Engine, unit: Unit) -> None:
    """Wait for the gathers that have started; starting the others has failed."""
    for bucket in unit.buckets:
        if bucket.is_gathered:
            bucket.materialized.finish()


def _conceal(_: Engine, unit: Unit) -> None:
    """Show the sharded parameters, but keep the memory of the unsharded ones."""
    for bucket in unit.buckets:
        bucket.keep_requires_grad()
    unit.registration.show_sharded(unit.buckets)


def _reshard(engine: Engine, unit: Unit, *, to_secondary: bool = False) -> None:
    """Show the sharded parameters and free the unsharded ones, except secondary shards."""
    _conceal(engine, unit)
    for bucket in unit.buckets:
        bucket.reshard(to_secondary=to_secondary, retained=unit in engine.retained)


def _forget(_: Engine, unit: Unit) -> None:
    """Forget all gradients that were not fully reduced."""
    for bucket in unit.buckets:
        bucket.forget_gradients()


def _each(
    act: Callable[[Gradients], None], *, may_wait: bool = False
) -> Callable[[Engine, Unit], None]:
    """Return the action that calls ``act`` on the gradients of each bucket.

    ``may_wait``: gradients may wait though the unsharded side was forgotten; make it again.
    """

    def act_on_each(engine: Engine, unit: Unit) -> None:
        for bucket in unit.buckets if may_wait else ():
            if bucket.unsharded is None:
                _materialize(engine, unit, bucket)
                bucket.reshard()  # all-gather hooks have gathered
        for gradients in unit.gradients():
            act(gradients)

    return act_on_each


_ACTS: dict[Op, Callable[[Engine, Unit], None]] = {
    Op.UNSHARD: _unshard,
    Op.WAIT: _wait,
    Op.FINISH_GATHER: _finish_gather,
    Op.CONCEAL: _conceal,
    Op.RETAIN: lambda engine, unit: engine.retained.add(unit),
    Op.RESHARD: _reshard,
    Op.RESHARD_TO_SECONDARY: partial(_reshard, to_secondary=True),
    Op.REDUCE_SCATTER: _each(Gradients.start, may_wait=True),
    Op.ALL_REDUCE: _each(Gradients.all_reduce, may_wait=True),
    Op.KEEP_PARTIAL: _each(Gradients.keep_partial),
    Op.FINISH_REDUCE: _each(Gradients.finish),
    Op.ACCUMULATE: _each(Gradients.accumulate),
    Op.DISCARD: _each(Gradients.discard),
    Op.FORGET: _forget,
}
"""The function that carries out each action."""

_ENDS = {when.TaskEnd, when.TaskDied, when.Reset, when.Finalize, when.AwaitReductions}
