"""Report the progress of long operations to a function of the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

__all__ = ["Operation", "Progress", "on_progress"]


class Progress(NamedTuple):
    """The progress of an operation: of this process, or of all ranks if they count together.

    Attributes:
        what: the operation, such as "loading step-000100" or "planning".
        done: the finished part, in ``unit``.
        total: all of it; None if that is not known.
        unit: the unit of both, in the plural, such as "bytes".
    """

    what: str
    done: int
    total: int | None
    unit: str


Listener = Callable[[Progress], object]

_listener: ContextVar[Listener | None] = ContextVar("_listener", default=None)


@contextmanager
def on_progress(listener: Listener) -> Iterator[None]:
    """Call ``listener`` with the progress of operations that this thread begins in the block.

    The calls come at the start of an operation and after each part, such as some megabytes. A
    background save calls ``listener`` from a thread of its own, even after the block. An exception
    that ``listener`` raises fails the operation.
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Operation:
    """Reports the progress of one operation to the listener of ``on_progress``.

    Args:
        what, total, unit: as in ``Progress``.
    """

    def __init__(self, what: str, total: int | None = None, unit: str = "bytes") -> None:
        self._listener = _listener.get()
        self._progress = Progress(what, 0, total, unit)
        self.add(0)

    def add(self, done: int) -> None:
        """Add ``done`` to the finished part, and call the listener."""
        if self._listener is not None:
            self._progress = self._progress._replace(done=self._progress.done + done)
            self._listener(self._progress)
