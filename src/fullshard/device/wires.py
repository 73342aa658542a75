"""Collectives that run on a stream of their own, beside the stream that starts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch

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
