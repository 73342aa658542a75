"""Collectives on streams of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fullshard.comm import Around, Pending


@dataclass(frozen=True)
class Beside(Around):
    """``inner`` on ``stream``, beside the stream that is current when something is started.

    What is started comes after all that was issued on the current stream. Who waits, waits for an
    event of that collective alone: neither for the next one on the stream, nor does the next one
    wait for what follows this one. All use of one stream must come from one lane, so that memory
    which ``inner`` allocates and frees there is not used again while that lane still reads it.
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
        return _Issued(pending, done, self)


@dataclass(frozen=True, slots=True)
class _Issued:
    pending: Pending
    done: Any
    wire: Beside

    def wait(self) -> None:
        """Let the current stream wait for what was issued, and for what ``inner`` left to be."""
        self.wire.accelerator.current_stream(self.wire.device).wait_event(self.done)
        self.pending.wait()
