"""Where the steps of a model are, as far as other ranks must know."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from fullshard.comm import ledger
from fullshard.comm.ledger import Era, now

__all__ = [
    "Failure",
    "HalfStep",
    "Step",
    "described",
    "forget_failures",
    "steps",
    "verdict_pending",
]


class Failure(NamedTuple):
    """An exception that ended a step, or the program."""

    text: str
    """What it was, and where."""
    at_s: float
    """When, by ``time.monotonic``."""
    is_half_stepped: bool = False
    """True if it left a step of an optimizer."""


class HalfStep(NamedTuple):
    """A step of an optimizer that an exception left, which was caught: weights may differ now."""

    place: str
    """Such as "in the step of AdamW"."""
    era: Era
    """The era in which the step began."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Step:
    """The step under way of one engine."""

    is_open: bool = False
    """True from the beginning of a forward to the end of its backward."""
    failure: Failure | None = None
    """What ended the last step, until all ranks know or the next step begins."""
    place: str = ""
    """Where an exception left the last step, such as "in the forward of unit blocks.3"; empty once
    this step ends well or any begins, as the exception was caught then."""
    era: Era = field(default_factory=now)
    """The era in which the step began."""
    half_step: HalfStep | None = None
    """What was left behind by an optimizer, until all ranks know or weights are loaded."""
    number: int = 0
    """Tells the steps of all engines of this process apart."""
    beside: frozenset[int] = frozenset()
    """The steps of other engines that were open when the last one ended with gradients."""

    def __post_init__(self) -> None:
        with _lock:
            _steps.add(self)

    def begin(self) -> None:
        """Begin a step, or another forward of it.

        Raises:
            PeerError, ProtocolError, LostRankError, TornStepError: the other ranks have dropped
                this step.
        """
        for step in steps():
            step.place = ""
        if self.is_open:
            return
        with _no_verdict_pending():
            inside = ledger.within.era
            if inside is not None:
                inside.check()
            self.era, self.failure = now(), None
            self.era.raise_deferred()
            self.is_open, self.number = True, next(_numbers)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Make what begins and is issued in the block part of this step, which others may drop."""
        before, ledger.within.era = ledger.within.era, self.era
        try:
            yield
        finally:
            ledger.within.era = before

    def report_half_step(self) -> Era | None:
        """Say of this rank that its weights are stepped in part, if they are.

        Returns:
            The era that ends by it; None if there is nothing to say: weights are whole, or all
            ranks have reported a half-stepped optimizer since.
        """
        half_step, self.half_step = self.half_step, None
        if half_step is None:
            return None
        with _no_verdict_pending():
            if half_step.era.is_half_stepped:
                return None
            self.failure = Failure(
                f"an exception, {half_step.place}", time.monotonic(), is_half_stepped=True
            )
            ledger.unsettled = True
            return now()

    def check(self) -> None:
        """Raise the error of the fault that ended this step's era, in the middle of the step."""
        if self.is_open:
            self.era.check()

    def left(self, place: str) -> None:
        """Take note of where an exception leaves the step; the innermost place comes first."""
        self.place = self.place or place

    def end(
        self, error: BaseException | None = None, *, failed: bool, trained: bool = False
    ) -> None:
        """End the step.

        Args:
            error: the exception that ended it, if known.
            failed: an exception did.
            trained: it ended well, with gradients.
        """
        was_open, self.is_open = self.is_open, False
        if was_open and not failed:
            self.place = ""
        if trained and was_open:
            self._end_for_all()
        if failed and not self.was_dropped:
            what = "an exception" if error is None else described(error)
            self.failure = Failure(f"{what}, {self.place}", time.monotonic())
            with _lock:
                _failed.add(self)
            ledger.unsettled = True

    def _end_for_all(self) -> None:
        """Take note on the ledgers that a step of training ended, once it has for all its engines.

        What was open when this engine ended the step before, too, is a forward whose output nobody
        needs: ranks forget such models at different times, and their ledgers must be alike.
        """
        others = frozenset(step.number for step in steps() if step.is_open)
        if others <= self.beside:
            ledger.end_step()
        self.beside = others

    @property
    def was_dropped(self) -> bool:
        """True if a fault ended the era of the last step."""
        return self.era.error is not None


def described(error: BaseException) -> str:
    """Return the last line of a traceback, and where in the user's files it was raised."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    return text + (f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else "")


verdict_pending = threading.Lock()
"""Held from reporting the status until the verdict: no step may start in between, so that all ranks
know which step they drop."""

_VERDICT_S = 10.0  # seconds; a verdict takes less, unless the store's process is gone


@contextlib.contextmanager
def _no_verdict_pending() -> Iterator[None]:
    """Hold ``verdict_pending`` in the context; after ``_VERDICT_S`` go on without it."""
    is_free = verdict_pending.acquire(timeout=_VERDICT_S)
    try:
        yield
    finally:
        if is_free:
            verdict_pending.release()


_numbers = itertools.count(1)
_steps: weakref.WeakSet[Step] = weakref.WeakSet()
_lock = threading.Lock()
_failed: set[Step] = set()  # holds those whose model is gone: other ranks may still wait for them


def steps() -> list[Step]:
    """Return the steps of all engines of this process, and those that failed and were not told."""
    with _lock:  # the main thread adds to them
        _failed.intersection_update([step for step in _failed if step.failure is not None])
        return list({*_steps, *_failed})


def forget_failures() -> None:
    """Forget failures of an earlier job of this process."""
    now().clear_deferred()
    for step in steps():
        step.failure = None
