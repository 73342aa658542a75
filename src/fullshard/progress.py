"""Report the progress of loading, saving, verifying and comparing files, and of planning.

``on_progress`` shows it to a function of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

__all__ = ["Operation", "Progress", "on_progress"]


class Progress(NamedTuple):
    """What an operation has done so far on this process.

    Attributes:
        what: the operation, such as "loading" or "planning".
        done: the finished part, in ``unit``.
        total: all of it; None if that is not known.
        unit: "bytes", or else the plural of what is counted.
    """

    what: str
    done: int
    total: int | None
    unit: str


Listener = Callable[[Progress], object]

_listener: ContextVar[Listener | None] = ContextVar("_listener", default=None)


@contextmanager
def on_progress(listener: Listener) -> Iterator[None]:
    """Call ``listener`` with the progress of all operations that begin in this context.

    It is called when an operation begins, and after each piece of it, such as some megabytes. A
    save in the background calls it from its own thread, also after the context. An error that it
    raises ends the operation as its own errors do.
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Operation:
    """An operation that says how far it is.

    Args:
        what, total, unit: as in ``Progress``.
    """

    def __init__(self, what: str, total: int | None = None, unit: str = "bytes") -> None:
        self._listener = _listener.get()
        self._progress = Progress(what, 0, total, unit)
        self.add(0)

    def add(self, done: int) -> None:
        """Count what was done since the last call."""
        if self._listener is not None:
            self._progress = self._progress._replace(done=self._progress.done + done)
            self._listener(self._progress)
