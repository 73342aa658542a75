"""Signals that ask a worker to stop: it saves after its step, and ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ONCE_S = 2.0  # a terminal's signal comes twice, as launchers forward it


class Stopping:
    """A request to stop; a second signal after ``_ONCE_S`` ends the process at once.

    Attributes:
        is_asked: whether this worker got a signal.
        is_agreed: whether any worker got a signal; equal on all workers.
    """

    def __init__(self) -> None:
        self.is_asked = self.is_agreed = False
        self._first_s = 0.0

    def ask(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal."""
        now_s = time.monotonic()
        if self.is_asked and now_s - self._first_s > _ONCE_S:
            os._exit(128 + number)
        if not self.is_asked:
            self.is_asked, self._first_s = True, now_s


@contextmanager
def stopping() -> Iterator[Stopping]:
    """Handle SIGTERM and SIGINT during the block; outside of the main thread, do nothing."""
    found = Stopping()
    is_main = threading.current_thread() is threading.main_thread()
    with handling(_SIGNALS if is_main else (), found.ask):
        yield found


@contextmanager
def handling(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle these signals by ``handler`` during the block, except those that are ignored.

    ``nohup`` lets a command ignore SIGHUP, and shells let background jobs ignore SIGINT.
    """
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
