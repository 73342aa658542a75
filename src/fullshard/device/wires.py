"""Collectives that run on a stream of their own, beside the stream that starts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fullshard.comm import Pending, Then, Wrapper


@dataclass(frozen=True)
class OnStream(Wrapper):
    """The collectives of ``inner``, issued on ``stream``.

    A collective waits for the work issued so far on the current stream, and not for later work.
    ``wait`` waits for the event of that collective, and not for later collectives on ``stream``.
    Use ``stream`` from one lane only: otherwise memory that ``inner`` allocates and frees there
    could be reused while the lane still reads it.
    """

    accelerator: ModuleType
    device: torch.device
    stream: Any

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """See ``Collectives.all_gather``."""
        return self._issue(partial(self.inner.all_gather, outputs, sources))

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """See ``Collectives.reduce_scatter_mean``."""
        return self._issue(partial(self.inner.reduce_scatter_mean, output, source))

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """See ``Collectives.all_reduce_mean``."""
        return self._issue(partial(self.inner.all_reduce_mean, values))

    def all_to_all(self, output: Tensor, source: Tensor) -> Pending:
        """See ``Collectives.all_to_all``."""
        return self._issue(partial(self.inner.all_to_all, output, source))

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """See ``Collectives.broadcast``."""
        return self._issue(partial(self.inner.broadcast, values, source))

    def _issue(self, start: Callable[[], Pending]) -> Pending:
        accelerator = self.accelerator
        ready = accelerator.Event()
        ready.record(accelerator.current_stream(self.device))
        self.stream.wait_event(ready)
        with accelerator.stream(self.stream):
            pending = start()
        done = accelerator.Event()
        done.record(self.stream)
        return Then(None, partial(self._end, done, pending))

    def _end(self, done: Any, pending: Pending) -> None:
        """Make the current stream wait for the collective, then let ``inner`` finish its part."""
        self.accelerator.current_stream(self.device).wait_event(done)
        pending.wait()
