"""Steps of optimizers, which make unsharded copies stale, whoever built the optimizer.

Version counters do not see the writes of foreach and fused optimizers. If ranks are threads, other
ranks may be in the middle of a step, and must not gather units that this rank does not gather.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fullshard import _torch


class Watcher(Protocol):
    """An observer of optimizer steps: an engine."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Take note of a step; called in the thread of the optimizer, perhaps another rank's."""


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
_lock = threading.Lock()


def watch_steps(watcher: Watcher) -> None:
    """Report all steps to ``watcher`` for as long as it lives."""
    with _lock:
        _watchers.add(watcher)


@_torch.never_compiled
def _after_step(optimizer: Optimizer, *_: object) -> None:
    with _lock:
        watchers = list(_watchers)
    for watcher in watchers:
        watcher.stepped(optimizer)


register_optimizer_step_post_hook(_after_step)
