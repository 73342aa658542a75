"""Steps of optimizers, which make unsharded copies stale, whoever built the optimizer.

Version counters do not see the writes of foreach and fused optimizers. If ranks are threads, other
ranks may be in the middle of a step, and must not gather units that this rank does not gather.

A step that has begun and not ended, and is on no stack, was left by an exception that somebody
caught: its weights are half-stepped. Nobody sees that exception, so this is looked for when
weights are used next. Optimizers are held weakly: to hold the frame of a step would keep the
memory of one that its user drops because memory ran out.

Optimizers of ours say of a step that they refuse, before anything is stepped, that it has ended:
what they refuse they refuse on all ranks. Nobody else can say so, not even of an exception that
comes first in a step, since other ranks may have stepped meanwhile.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import NamedTuple, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fullshard import _torch
from fullshard.comm.fault_domain import Era, fault_domain


class Listener(Protocol):
    """A listener to optimizer steps: an engine."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Take note of a step; called in the thread of the optimizer, perhaps another rank's."""

    def left_in_part(self, optimizer: Optimizer, era: Era) -> None:
        """Take note of a step, begun in ``era``, that an exception has left."""


class _Begun(NamedTuple):
    """A step that has begun and not ended."""

    era: Era
    depth: int
    """How many calls of ``step`` are within each other: a class may call that of its base."""


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
_begun: weakref.WeakKeyDictionary[Optimizer, _Begun] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def hear_steps(listener: Listener) -> None:
    """Report all steps to ``listener`` for as long as it lives."""
    _listen()
    with _lock:
        _listeners.add(listener)


def find_left(beginning: Optimizer | None = None) -> None:
    """Report steps that exceptions have left, each once.

    Args:
        beginning: an optimizer that is about to step, so that it is on the stack once more.
    """
    if not _begun:
        return
    running = _torch.stepping_optimizers()
    if id(beginning) in running:
        running.remove(id(beginning))
    with _lock:
        left = {one: its.era for one, its in _begun.items() if id(one) not in running}
        for optimizer in left:
            del _begun[optimizer]
        listeners = list(_listeners)
    for optimizer, era in left.items():
        for listener in listeners:
            listener.left_in_part(optimizer, era)


def refused(optimizer: Optimizer) -> None:
    """Take note that the step of ``optimizer`` is refused, on all ranks, and has stepped nothing.

    To be called in the step, by an optimizer that raises an error of ours next.
    """
    with _lock:
        _begun.pop(optimizer, None)


@_torch.never_compiled
def _before_step(optimizer: Optimizer, *_: object) -> None:
    if optimizer in _begun:  # left, and tried again, or inside of its own step
        find_left(optimizer)
    fault_domain().check_aborted()  # gradients may be the results of aborted collectives
    with _lock:
        outer = _begun.get(optimizer)
        _begun[optimizer] = (
            _Begun(fault_domain().era, 1) if outer is None else _Begun(outer.era, outer.depth + 1)
        )


@_torch.never_compiled
def _after_step(optimizer: Optimizer, *_: object) -> None:
    with _lock:
        its = _begun.pop(optimizer, None)
        if its is not None and its.depth > 1:
            _begun[optimizer] = _Begun(its.era, its.depth - 1)
        listeners = list(_listeners)
    for listener in listeners:
        listener.stepped(optimizer)


@functools.cache
def _listen() -> None:
    """Hear of all steps, once something is sharded.

    Not before: a step that ``frontend.optimizers`` refuses, by an earlier hook, has not begun.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
