"""When this process asks: a collective failed, a step failed, or the program ends."""

from __future__ import annotations

import atexit
import sys
from types import TracebackType

from fullshard.comm import ledger
from fullshard.comm.ledger import Entry, Ledger
from fullshard.errors import PeerError
from fullshard.watch.step import Step, described, steps
from fullshard.watch.watcher import all_watchers, watcher

__all__ = ["explain", "settle"]


def explain(error: RuntimeError, of: Ledger, entry: Entry) -> Exception:
    """Return what to raise for ``error``, which ended collective ``entry``: the fault, if found."""
    watching = watcher()
    if of.era.error is None and watching is not None:
        watching.ask()
    if of.era.error is None or (isinstance(error, PeerError) and error.args == _text(of)):
        return error
    return of.era.error()


def _text(of: Ledger) -> tuple[object, ...]:
    assert of.era.error is not None
    return of.era.error().args


def settle(step: Step) -> None:
    """Find out what the failure of the last step did to others, before the next begins.

    Either all ranks failed at the same place, or the others are told, and drop the step, too.
    """
    watching = watcher()
    if step.failure and watching is not None:
        watching.ask()


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Tell the other ranks of an exception that ends this program, then the user."""
    for watching in all_watchers():
        places = [step.place for step in steps() if step.place]
        watching.failure = ", ".join([described(error), *places[:1]])
        watching.ask()
        watching.leave(f"ended by {watching.failure}")
    _before(kind, error, trace)


def _leave() -> None:
    for watching in all_watchers():
        watching.leave(watching.failure or "ended its program")


_before = sys.excepthook
sys.excepthook = _excepthook
atexit.register(_leave)
ledger.explain = explain
