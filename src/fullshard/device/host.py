"""Memory of the host for copies to and from a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def host_tensor(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Return a 1-D CPU tensor; if ``pinned``, copies to and from a device can be asynchronous."""
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, pin_memory=pinned, device="cpu")


class HostReader:
    """Copies tensors from ``device`` to the host, in any thread, on a stream of its own.

    The copies wait for work that the current stream was given before the reader was made, and not
    for later work. So they read the values that the tensors have after that earlier work.
    """

    def __init__(self, device: torch.device) -> None:
        self._accelerator = None if device.type == "cpu" else torch.get_device_module(device)
        if self._accelerator is not None:
            self._stream = self._accelerator.Stream(device=device)
            self._stream.wait_stream(self._accelerator.current_stream(device))

    def on_own_stream(self) -> AbstractContextManager[Any]:
        """Issue the work of the ``with`` block on the reader's stream, in order with ``read``."""
        if self._accelerator is None:
            return nullcontext()
        stream: AbstractContextManager[Any] = self._accelerator.stream(self._stream)
        return stream

    def read(self, source: Tensor, into: Tensor) -> None:
        """Copy ``source`` to ``into``, of the same shape on the host, and wait for it."""
        with self.on_own_stream():
            into.copy_(source, non_blocking=self._accelerator is not None)
        if self._accelerator is not None:
            self._stream.synchronize()
