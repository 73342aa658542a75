"""Collectives that the device of this process may still run, the oldest of which may hang."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import NamedTuple, Protocol

from fullshard._torch import device as _device

KEPT = 32
"""The number of collectives that a ledger remembers."""

Entry = tuple[int, str, str, int]
"""A collective that this process issued: its number in the group and era, from 0, its kind, its
label (may be empty), and the bytes that this rank contributes. The garbage collector soon stops
tracking plain tuples, so this is one."""


class Mark(Protocol):
    """A point in the work of a device, such as an event."""

    def query(self) -> bool:
        """Return whether the device has passed the mark; never blocks."""


class Wait(NamedTuple):
    """A wait of this process for a collective."""

    entry: Entry
    since_s: float
    """The start of the wait, by ``time.monotonic``."""
    on_device: bool
    """True if the device waits, and the host may have gone on."""


class Underway:
    """Collectives that were issued to a device and may not be complete.

    The host may run ahead of the device by any number of collectives, and the oldest may be the
    one that hangs. So marks are removed only once the device has passed them; the host checks them
    when there are many.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[Entry, Mark, float]] = deque()
        self._most = KEPT  # the number of marks above which the host checks them
        # The oldest collective, and the time when it was first seen as the oldest.
        self._first: tuple[Entry | None, float] = (None, 0.0)
        self._removing = threading.Lock()  # the host and the watch may find the same mark passed

    def add(self, entry: Entry, mark: Mark) -> None:
        """Add a collective and the mark behind it."""
        self._marks.append((entry, mark, time.monotonic()))
        if len(self._marks) > self._most:
            self.first()
            self._most = max(KEPT, 2 * len(self._marks))

    def clear(self) -> None:
        """Remove all collectives."""
        self._marks.clear()

    def first(self, least_s: float = 0.0) -> Wait | None:
        """Return the wait for the first incomplete collective, if it was issued ``least_s`` ago.

        The marks that the device has passed are removed. The wait starts when the collective was
        first seen as the oldest, not when it was issued. Where a query of a mark could invalidate a
        CUDA graph capture, no mark is queried and the result is None.
        """
        with contextlib.suppress(IndexError), _device.beside_captures() as may_ask:
            while may_ask:  # another thread may add or clear marks meanwhile
                entry, mark, issued_s = self._marks[0]
                if time.monotonic() - issued_s < least_s:
                    return None
                if _is_passed(mark):
                    with self._removing:
                        if self._marks[0][0] is entry:
                            self._marks.popleft()
                    continue
                if self._first[0] is not entry:
                    self._first = (entry, time.monotonic())
                return Wait(entry, self._first[1], on_device=True)
        return None


def _is_passed(mark: Mark) -> bool:
    try:
        return mark.query()
    except RuntimeError:  # the device is broken; its next use raises that
        return True
