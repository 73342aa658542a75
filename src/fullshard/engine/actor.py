"""Carrying out the actions of a scheduler: which part of a unit does what, and in which order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from fullshard import _torch, watch
from fullshard.device import Lane, Lanes, StorageMeter
from fullshard.engine.acts import (
    BY_ITSELF,
    GIVES_GRADIENTS,
    ON_GRADIENTS,
    ON_UNITS,
    STARTS,
    TAKES_GRADIENTS,
)
from fullshard.engine.autograd import Backward
from fullshard.engine.reduce import Gradients, settle
from fullshard.engine.unit import Unit
from fullshard.errors import BusyError, ProtocolError
from fullshard.schedule import IN_USE, Action, Observer, Op, Residency, Scheduler, UnitPolicy
from fullshard.schedule.triggers import NO_TASK


class Actor(ABC):
    """The units of an engine, what their state allows, and how actions on them are carried out.

    A base of ``Engine``.
    """

    def __init__(self, units: Sequence[Unit], backward: Backward) -> None:
        self.units = list(units)
        self.scheduler = Scheduler()
        self.meter = StorageMeter()
        self.observer: Observer | None = None
        self.post_optim_event: Any = None  # if set, the next fence waits for it, not for compute
        self._backward = backward
        self._step = watch.Step()
        self._asking: list[Gradients] = []  # waiting for flags to be read once backward has ended

    @property
    @abstractmethod
    def lanes(self) -> Lanes:
        """The lanes of the units' device."""

    def keep_memory(self, unit: Unit, keep: bool) -> None:
        """Set whether ``unit`` keeps the memory of its unsharded parameters when resharded."""
        for bucket in unit.buckets:
            bucket.keeps_memory = keep
        if not keep and self.scheduler.residents.units[unit.key].residency is Residency.SHARDED:
            for bucket in unit.buckets:
                bucket.reshard()

    def policy_of(self, unit: Unit) -> UnitPolicy:
        """Return the user's choices for ``unit``."""
        return self.scheduler.residents.units[unit.key].policy

    def shares_params(self, optimizer: Optimizer) -> bool:
        """Return whether ``optimizer`` steps some of our parameters."""
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        params = (p for unit in self.units for b in unit.buckets for p in b.stepped_params)
        return any(id(param) in stepped for param in params)

    @property
    def is_running(self) -> bool:
        """True in the middle of a forward or a backward."""
        return not self.scheduler.idle or _torch.current_task() != NO_TASK

    def backward_is_over(self) -> bool:
        """Wait for the end of a backward that this thread is not in, and return whether it came.

        Return True without waiting inside of a forward or a backward.
        """
        if _torch.current_task() != NO_TASK or self.scheduler.iteration is not None:
            return True
        return self._backward.are_over()

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

    def check_carried(self, unit: Unit) -> None:
        """Refuse a forward of a unit that only a running forward of its carrier makes usable."""
        carrier = self.scheduler.residents.units[unit.key].carrier
        if carrier is not None and not carrier.holds & IN_USE:
            around = self.units[carrier.key].name or "(root)"
            raise ProtocolError(
                f"a forward of unit {unit.name}, which ranks may skip and which is therefore "
                f"gathered with unit {around}, came outside of the forward of {around}: other "
                f"ranks may not take part. Call it inside of that forward, or call "
                "set_skip_tolerance(False) on it"
            )

    def act_all(self, actions: Sequence[Action], *, to_the_end: bool) -> None:
        """Carry out ``actions`` in order; ``to_the_end``: all of them, even if one fails."""
        if not actions:
            return
        with torch.no_grad(), _torch.outside_of_transforms():
            if to_the_end:
                self._act_to_the_end(actions)
                if self.scheduler.idle:  # a CUDA graph of a step must end with lanes joined
                    self.lanes.join(Lane.COMPUTE, Lane.GATHER)
            else:
                act = self._actor
                for action in actions:
                    act(action)
                self._settle()

    def _act_to_the_end(self, actions: Sequence[Action]) -> None:
        """Carry out all actions even if one fails, then raise the first failure.

        The scheduler assumes that all actions were done, and nobody would retry them. Only actions
        that need other ranks are skipped, once those ranks may be gone.
        """
        failure: Exception | None = None
        act = self._actor
        for action in actions:
            apart = failure is not None and not isinstance(failure, ProtocolError)
            if apart and action.op not in BY_ITSELF:
                continue
            try:
                act(action)
            except Exception as error:
                failure = failure or error
        if failure is None or isinstance(failure, ProtocolError):
            self._settle()
        if failure is not None:
            raise failure

    def _settle(self) -> None:
        """Read which gradients exist where that is not known yet, once backward has ended."""
        if self._asking and not self.scheduler.in_backward:
            asking, self._asking = self._asking, []
            settle(dict.fromkeys(asking), self.lanes)

    def forget_asked(self) -> None:
        """Forget gradients of which it is not known whether they exist."""
        self._asking.clear()

    @property
    def _actor(self) -> Callable[[Action], None]:
        """Return the function that carries out an action and tells the observer, if any."""
        return self._act if self.observer is None else self._act_observed

    def _act_observed(self, action: Action) -> None:
        assert self.observer is not None
        with self.observer.acting(action):
            self._act(action)

    def _act(self, action: Action) -> None:
        if action.unit is None:
            self._fence()
            return
        unit = self.units[action.unit]
        if not _torch.is_profiling():
            self._do(action.op, unit)
            return
        with record_function(f"fullshard::{action.op.value} {unit.name or '(root)'}"):
            self._do(action.op, unit)

    def _do(self, op: Op, unit: Unit) -> None:
        if op not in STARTS:
            self._carry_out(op, unit)
            return
        self._step.check()
        inside = self._step.domain.inside
        before = inside.era
        if before is None and self._step.is_open:
            inside.era = self._step.era
        try:
            self._carry_out(op, unit)
        finally:
            inside.era = before

    def _carry_out(self, op: Op, unit: Unit) -> None:
        if op is Op.UNSHARD:
            self._unshard(unit)
            return
        if op in ON_GRADIENTS:
            for gradients in unit.gradients():
                ON_GRADIENTS[op](gradients)
        else:
            ON_UNITS[op](unit)
        if op in TAKES_GRADIENTS:
            self._backward.reduced(unit)
        elif op in GIVES_GRADIENTS:
            self._asking += [one for one in unit.gradients() if one.asked is not None]

    def _fence(self) -> None:
        """Make gathers wait for the values that the optimizer wrote."""
        event, self.post_optim_event = self.post_optim_event, None
        if event is None:
            self.lanes.join(Lane.GATHER, Lane.COMPUTE)
        else:
            self.lanes.wait_event(Lane.GATHER, event)
        if not len(self.scheduler.reductions):  # their memory may belong to an earlier stream
            self.lanes.untrack_streams()

    def _unshard(self, unit: Unit) -> None:
        fresh = unit.materialize(self.lanes, self.meter)
        if fresh:
            self._backward.watch(unit, fresh)
            unit.sync_requires_grad()
        if self.scheduler.idle:  # the user unshards; otherwise a root has just looked after us
            unit.was_written()
        unit.start_unshard()
