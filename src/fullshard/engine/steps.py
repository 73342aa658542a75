"""Optimizer steps, which make unsharded copies stale, and the step log of an engine.

Version counters do not see the writes of foreach and fused optimizers, so hooks on all optimizers
report their steps. If ranks are threads, another rank may be in the middle of a step; this rank
must not gather units that the other ranks do not gather.

If a step started, did not finish and is on no thread's stack, an exception interrupted it and was
caught: its weights are half-stepped. Such steps are looked for when weights are used next.
Optimizers are held weakly: the frame of a step would keep memory that its user frees after running
out of it.

Our optimizers call ``refused`` when they reject a step before changing weights; all ranks reject it
alike. After any other exception, even an early one, other ranks may have stepped.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fullshard import watch
from fullshard._torch import dynamo as _dynamo
from fullshard._torch import nn as _nn
from fullshard.comm.fault_domain import Era, fault_domain
from fullshard.errors import TornStepError


class StepLog:
    """The current step of one engine, and the record of earlier steps that were interrupted.

    Args:
        owns: whether the engine has parameters that an optimizer steps.
        wrote: called when such an optimizer, or one in the engine's thread, has stepped.
        drop: ends the forward and the backward under way, and drops all gradients.
    """

    def __init__(
        self,
        owns: Callable[[Optimizer], bool],
        wrote: Callable[[], None],
        drop: Callable[[], None],
    ) -> None:
        self.thread = threading.get_ident()
        """The thread of the last forward outside of backward."""
        self.step = watch.Step()
        """The step as the watch follows it."""
        self._owns = owns
        self._wrote = wrote
        self._drop = drop
        _listen()
        with _lock:
            _logs.add(self)

    def close(self) -> None:
        """Stop listening to optimizer steps; the units have another engine."""
        with _lock:
            _logs.discard(self)

    def begin(self) -> None:
        """Begin a step, or another forward of it, once all ranks know of the last failure.

        Raises:
            PeerError, ProtocolError, LostRankError, TornStepError: the ranks have dropped the step.
        """
        find_interrupted()
        half_stepped = watch.report_half_step(self.step)
        watch.await_verdict()
        if self.step.was_dropped:
            self._drop()
        if half_stepped is not None:
            raise half_stepped
        self.step.begin()

    def run(self, start: Callable[..., None], *args: object) -> None:
        """Call ``start(*args)``, which starts collectives, as a part of the step.

        Raises:
            PeerError, ProtocolError, LostRankError, TornStepError: the ranks have dropped the step.
        """
        step = self.step
        step.check()
        inside = step.domain.inside
        before = inside.era
        if before is None and step.is_open:
            inside.era = step.era
        try:
            start(*args)
        finally:
            inside.era = before

    def end(
        self, error: BaseException | None = None, *, failed: bool, trained: bool = False
    ) -> None:
        """End the step, see ``watch.Step.end``; drop its gradients if the other ranks do."""
        self.step.end(error, failed=failed, trained=trained)
        if self.step.was_dropped:
            self._drop()

    def stepped(self, optimizer: Optimizer) -> None:
        """Mark unsharded copies as stale after a step of ``optimizer``, if it may have written.

        Called in the thread of the optimizer, perhaps another rank's.
        """
        if self.thread == threading.get_ident() or self._owns(optimizer):
            self._wrote()

    def interrupted(self, optimizer: Optimizer, era: Era) -> None:
        """Record that an exception interrupted a step of ``optimizer``, begun in ``era``.

        Ignored without peers: the caller saw the exception.
        """
        if watch.watcher() is not None and self._owns(optimizer):
            self.step.half_step = watch.HalfStep(f"in the step of {type(optimizer).__name__}", era)

    def check_complete(self, what: str) -> None:
        """Raise ``TornStepError`` if an interrupted optimizer step left weights partly updated."""
        find_interrupted()
        if self.step.half_step is not None:
            raise TornStepError(
                f"{what} was called after an exception was caught "
                f"{self.step.half_step.place}: the weights are half-stepped. "
                "Load a checkpoint on all ranks"
            )

    def forget_interrupted(self) -> None:
        """Clear the record of an interrupted step: weights were loaded, or the ranks agreed."""
        find_interrupted()
        self.step.half_step = None


class _Begun(NamedTuple):
    """A step that has started and not finished."""

    era: Era
    depth: int
    """How many calls of ``step`` are within each other: a class may call that of its base."""


_logs: weakref.WeakSet[StepLog] = weakref.WeakSet()
_begun: weakref.WeakKeyDictionary[Optimizer, _Begun] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def find_interrupted(beginning: Optimizer | None = None) -> None:
    """Report interrupted steps, each once.

    Args:
        beginning: an optimizer that is about to step, so that it is on the stack once more.
    """
    if not _begun:
        return
    with _lock:
        begun = dict(_begun)  # before the stacks are read: another thread may begin a step
    running = _nn.stepping_optimizers()
    if id(beginning) in running:
        running.remove(id(beginning))
    with _lock:
        left = {
            one: its.era
            for one, its in begun.items()
            if id(one) not in running and _begun.get(one) is its
        }
        for optimizer in left:
            del _begun[optimizer]
        logs = list(_logs)
    for optimizer, era in left.items():
        for one in logs:
            one.interrupted(optimizer, era)


def refused(optimizer: Optimizer) -> None:
    """Record that ``optimizer`` rejects its step on all ranks before changing any weight.

    To be called in the step, by an optimizer that raises an error of ours next.
    """
    with _lock:
        _begun.pop(optimizer, None)


@_dynamo.never_compiled
def _before_step(optimizer: Optimizer, *_: object) -> None:
    if optimizer in _begun:  # left, and tried again, or inside of its own step
        find_interrupted(optimizer)
    fault_domain().check_aborted()  # gradients may be the results of aborted collectives
    with _lock:
        outer = _begun.get(optimizer)
        _begun[optimizer] = (
            _Begun(fault_domain().era, 1) if outer is None else _Begun(outer.era, outer.depth + 1)
        )


@_dynamo.never_compiled
def _after_step(optimizer: Optimizer, *_: object) -> None:
    with _lock:
        its = _begun.pop(optimizer, None)
        if its is not None and its.depth > 1:
            _begun[optimizer] = _Begun(its.era, its.depth - 1)
        logs = list(_logs)
    for one in logs:
        one.stepped(optimizer)


@functools.cache
def _listen() -> None:
    """Hook all optimizer steps, once something is sharded.

    Not before: a step that ``frontend.optimizers`` refuses, by an earlier hook, has not begun.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
