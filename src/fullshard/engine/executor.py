"""The engine: reports events to the scheduler and carries out the actions that it answers."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from fullshard import _torch, watch
from fullshard.comm.fault_domain import Era
from fullshard.device import Lanes, make_lanes
from fullshard.engine.actor import Actor
from fullshard.engine.autograd import Backward, Use
from fullshard.engine.steps import find_left, hear_steps
from fullshard.engine.unit import Unit, check_lent_alike
from fullshard.errors import BusyError, PeerError, ProtocolError, TornStepError
from fullshard.schedule import (
    Event,
    Hold,
    MachinePolicy,
    Recorder,
    Residency,
    UnitPolicy,
)
from fullshard.schedule import triggers as when
from fullshard.schedule.triggers import NO_TASK, Follows, Trigger

log = logging.getLogger("fullshard")


class Engine(Actor):
    """The engine of one tree of modules: its units, with one scheduler and one set of lanes.

    It hears triggers and asks the scheduler; what that answers is carried out as ``Actor`` says.

    Each call of ``fully_shard`` joins the engines of the units below, so that in the end the root's
    engine runs all units, whichever of them runs forward first.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        policies: Sequence[UnitPolicy],
        machine: MachinePolicy | None = None,
    ) -> None:
        super().__init__(units, Backward(self.trigger, self._is_in_forward_elsewhere))
        self.scheduler.policy = machine or MachinePolicy()
        self.recorder: Recorder | None = None
        self.is_dry = False
        self.thread = threading.get_ident()  # the thread of the last forward outside of backward
        self._lanes: Lanes | None = None
        self._uses: dict[int, Use] = {}  # the last use of each unit
        self._told_hidden: set[int] = set()
        for key, unit in enumerate(units):
            unit.key = key
            unit.engine = self
        self.scheduler.add(*map(Unit.state, units, policies))
        hear_steps(self)
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
            key_of = {inner.key: len(units) + i for i, inner in enumerate(engine.units)}
            units += engine.units
            policies += [engine.policy_of(inner).renumbered(key_of) for inner in engine.units]
            if engine.scheduler.policy != MachinePolicy():
                machine = engine.scheduler.policy  # the user's last choice, as far as we know
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

    def stepped(self, optimizer: Optimizer) -> None:
        """Take note of a step of ``optimizer`` if it runs in our thread or steps our parameters."""
        if self.thread == threading.get_ident() or self.shares_params(optimizer):
            self.weights_changed()

    def left_in_part(self, optimizer: Optimizer, era: Era) -> None:
        """Take note of a step of ``optimizer``, begun in ``era``, that an exception has left.

        A rank that is alone is not told what it caught itself.
        """
        if watch.watcher() is not None and self.shares_params(optimizer):
            self._step.half_step = watch.HalfStep(f"in the step of {type(optimizer).__name__}", era)

    def check_whole(self, what: str) -> None:
        """Raise ``TornStepError`` if an exception in a step left the weights half-stepped."""
        find_left()
        if self._step.half_step is not None:
            raise TornStepError(
                f"{what} was called after an exception was caught "
                f"{self._step.half_step.place}: the weights are half-stepped. "
                "Load a checkpoint on all ranks"
            )

    def forget_left(self, unit: Unit) -> None:
        """Forget, with the root, steps left in part: it was loaded, or all ranks were told else."""
        if unit is self.units[-1]:
            find_left()
            self._step.half_step = None

    def trigger(self, trigger: Trigger) -> None:
        """Pass ``trigger`` to the scheduler, then carry out its actions; one thread at a time."""
        with self._backward.lock:
            if self._backward.dead and type(trigger) is not when.TaskDied:
                self._backward.report_dead()
            self._hear(trigger)

    def _hear(self, trigger: Trigger) -> None:
        if self._lanes is not None:
            self._lanes.track_stream()
        if type(trigger) is when.TaskDied:
            last = self.scheduler.backward_of
            place = "a backward" if last is None else f"the backward of {_named(self.units[last])}"
            self._step.left(f"in {place}")
        actions = self.scheduler.on(trigger)
        if self.recorder is not None:
            self.recorder.record(Event(trigger, actions))
        if type(trigger) in _ENDS:
            was_open = self._step.is_open
            try:
                self.act_all(actions, to_the_end=True)
            finally:
                if type(trigger) is when.Reset:
                    self._step.drop()
                elif not self.scheduler.in_backward:
                    failed = type(trigger) is when.TaskDied
                    self._end_step(failed=failed, trained=not failed)
            if was_open and type(trigger) is when.TaskEnd:
                self._step.era.check()  # the others drop this step, and raise
        elif actions:
            self.act_all(actions, to_the_end=False)

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

    # forward

    def enter(self, unit: Unit, member: int, inputs: Iterable[Tensor]) -> None:
        """Enter the forward of ``member`` of ``unit``, which is about to run on ``inputs``.

        Raises:
            ProtocolError: parameters are on the meta device, or lent to the first rank, or
                gradients are still being reduced for a handle, or the unit, which ranks may skip,
                runs outside of the unit that it is gathered with, or (``BusyError``) another
                thread is in a forward or a backward; nothing was changed.
        """
        if self._backward.tasks and not self.backward_is_over():
            raise BusyError(
                f"a forward of {_named(unit)} was called while another thread is in a backward of "
                "the model. Call it when that backward has ended"
            )
        with self._backward.lock:
            self._enter(unit, member, inputs)

    def _enter(self, unit: Unit, member: int, inputs: Iterable[Tensor]) -> None:
        self.check_awaited("a forward")
        self.check_carried(unit)
        task = self._backward.task()
        if task == NO_TASK:  # otherwise a thread of autograd, in which no optimizer steps
            here = threading.get_ident()
            if self.thread != here and self._is_in_forward_elsewhere():
                raise BusyError(
                    f"a forward of {_named(unit)} was called while another thread is in a forward "
                    "of the model. Call the model from one thread at a time"
                )
            self.thread = here
        if self.scheduler.idle:
            check_lent_alike(self.units, "a forward")
            self.look_after(self.units)
            if task == NO_TASK:
                self._begin_step()
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
        use = self._uses[unit.key] = Use(self._backward, unit, number)
        use.begin(inputs)
        if task == NO_TASK:
            use.watch()

    def exit(self, unit: Unit, member: int, outputs: Iterable[Tensor], *, failed: bool) -> None:
        """Exit the forward of ``member`` of ``unit``, which ended or was left by an exception."""
        with self._backward.lock:
            use = self._uses.get(unit.key)
            if use is None or not use.running:
                return  # another hook failed before ours, so the member never entered
            is_refused = self.thread != threading.get_ident() and self._is_in_forward_elsewhere()
            if is_refused and _torch.current_task() == NO_TASK:
                return
            self._leave(unit, member, use, outputs, failed=failed)

    def _leave(
        self, unit: Unit, member: int, use: Use, outputs: Iterable[Tensor], *, failed: bool
    ) -> None:
        inside = self.units if unit.num_inside else [unit]
        follows = use.end(() if failed else outputs, self.scheduler.last_use, inside)
        if failed:
            follows = Follows.NOTHING
        if follows is Follows.HIDDEN and _torch.current_task() == NO_TASK:
            self._tell_hidden(unit)
        self._exit(unit, member, follows, failed=failed)

    def _is_in_forward_elsewhere(self) -> bool:
        """Return whether another thread, which still lives, is in a forward outside of backward."""
        if self.scheduler.iteration is None or self.thread == threading.get_ident():
            return False
        return any(thread.ident == self.thread for thread in threading.enumerate())

    def _exit(self, unit: Unit, member: int, follows: Follows, *, failed: bool) -> None:
        task = _torch.current_task()
        if failed and not _torch.ends_recomputation(sys.exception()):
            self._step.left(f"in the forward of {_named(unit)}")
        self.trigger(when.ForwardExit(unit.key, member, task, follows, failed))
        if self.scheduler.idle and task == NO_TASK and follows is Follows.NOTHING:
            self._end_step(sys.exception(), failed=failed)

    def _begin_step(self) -> None:
        """Begin a step, or another forward of it, once the last one's failure is known to all."""
        find_left()
        half_stepped = watch.report_half_step(self._step)
        watch.settle()
        if self._step.was_dropped:
            self._drop_step()
        if half_stepped is not None:
            raise half_stepped
        self._step.begin()

    def _end_step(
        self, error: BaseException | None = None, *, failed: bool, trained: bool = False
    ) -> None:
        """End the step; without gradients, if other ranks cannot go on with it either."""
        self._step.end(error, failed=failed, trained=trained)
        if self._step.was_dropped:
            self._drop_step()

    def _drop_step(self) -> None:
        """Drop all gradients and begin anew, as all ranks do after a fault on one of them."""
        try:
            self.trigger(when.Reset())
        except (PeerError, ProtocolError, TornStepError) as error:
            # Collectives in flight never end.
            log.debug("after a fault: %s", error)
        self.forget_asked()
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.drop_gradients()

    def look_after(self, units: Iterable[Unit]) -> None:
        """Notice what was done to parameters between steps, and refuse units that cannot run.

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
        """Take note of writes to the shards of ``unit`` that nothing else notices.

        If the user unsharded the unit, gather it again at once, because the modules show it. A copy
        that waits for a backward stays, because it belongs to the weights of its forward.
        """
        self.weights_changed()
        state = self.scheduler.residents.leading(unit.key)
        if state.residency is Residency.UNSHARDED and state.holds == Hold.USER:
            self.trigger(when.UserUnshard(unit.key))
            self.trigger(when.UserWait(unit.key))

    def take_over(self, unit: Unit) -> None:
        """Notice parameters that were replaced, moved, cast or written since the last step."""
        unit.registration.take_over(unit)
        self._adopt(unit)

    def moved(self, unit: Unit, *, partly: bool) -> None:
        """Notice that ``fn`` of ``nn.Module._apply`` moved or cast ``unit``.

        ``partly``: only a part of the unit may have been moved so far, which is no error yet.
        """
        unit.registration.take_over(unit, keeps_ties=True)
        if not (partly and unit.differs()):
            self._adopt(unit)

    def _adopt(self, unit: Unit) -> None:
        state = self.scheduler.residents.units[unit.key]
        if not unit.is_current():
            self.end_reductions()
            self.trigger(when.WeightsChanged())
            self.trigger(when.UserReshard(unit.key))
            unit.adopt()
            unit.was_written()  # the adopted values include these writes
            state.nbytes = unit.nbytes
            state.reduction_nbytes = unit.reduction_nbytes
        elif unit.was_written() and state.residency:
            self.trigger(when.WeightsChanged())

    def _tell_hidden(self, unit: Unit) -> None:
        carrier = self.scheduler.residents.units[unit.key].carrier
        if unit.key in self._told_hidden or carrier is not None:  # the carrier sees more
            return
        self._told_hidden.add(unit.key)
        log.warning(
            "unit %s: the newest autograd node of its forward is not an output that can be found "
            "in lists, tuples, mappings and dataclasses, or a custom Function returns tensors on "
            "another device; the unit stays in memory until the first forward after an optimizer "
            "step. Return the tensor, or detach what needs no gradient",
            unit.name or "(root)",
        )


def _named(unit: Unit) -> str:
    return f"unit {unit.name or '(root)'}"


_ENDS = frozenset({when.TaskEnd, when.TaskDied, when.Reset})
