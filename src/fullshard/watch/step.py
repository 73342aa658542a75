"""The state of training steps that the watch reports to other ranks."""

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

from fullshard.comm.fault_domain import Era, FaultDomain, fault_domain
from fullshard.comm.ledger import close_step

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
    """An exception that ended a step or the program."""

    text: str
    """The exception and its place."""
    at_s: float
    """The time of the exception, by ``time.monotonic``."""
    is_half_stepped: bool = False
    """True if the exception left an optimizer in the middle of its step."""


class HalfStep(NamedTuple):
    """An optimizer's step that a caught exception left: weights may differ among ranks."""

    place: str
    """The place, such as "in the step of AdamW"."""
    era: Era
    """The era in which the step began."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Step:
    """The current step of one engine."""

    is_open: bool = False
    """True from the start of a forward to the end of its backward."""
    expects_backward: bool = False
    """True once a forward of the step has ended whose backward may come."""
    is_abandoned: bool = False
    """True if the step is open and other engines have trained since: its output was discarded."""
    failure: Failure | None = None
    """The exception that ended the last step, until all ranks know it or the next step begins."""
    failed_at_s: float = 0.0
    """The time of the last exception that ended a step, by ``time.monotonic``; 0 before one did."""
    place: str = ""
    """The place where an exception left the last step, such as "in the forward of unit blocks.3".

    Empty once this step ends without an error or any step begins: the exception was caught then.
    """
    domain: FaultDomain = field(default_factory=fault_domain)
    """The fault domain of the job in which the step began."""
    era: Era = field(default_factory=lambda: fault_domain().era)
    """The era in which the step began."""
    half_step: HalfStep | None = None
    """The optimizer's step that an exception left, until all ranks know it or load weights."""
    number: int = 0
    """The number of the step, among all steps of this process."""
    beside: frozenset[int] = frozenset()
    """The numbers of the steps of other engines that were open when this engine last trained."""

    def __post_init__(self) -> None:
        with _lock:
            _steps.add(self)

    def begin(self) -> None:
        """Begin a step, or another forward of the same step.

        Raises:
            PeerError, ProtocolError, LostRankError, TornStepError: the other ranks have dropped
                this step; or a fault has aborted groups of this job.
        """
        for step in steps():
            step.place = ""
        self.is_abandoned = False
        if self.is_open:
            return
        with _no_verdict_pending():
            self.domain = fault_domain()
            inside = self.domain.inside.era
            if inside is not None:
                inside.check()
            for step in steps():  # the other ranks know of these, or cannot be told
                if step.failure is not None and not step.failure.is_half_stepped:
                    step.failure = None
            self.era, self.failure = self.domain.era, None
            self.domain.training_thread = threading.get_ident()
            self.era.raise_deferred()
            self.domain.refuse_aborted()
            self.is_open, self.number = True, next(_numbers)
            self.expects_backward = False

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Treat collectives and steps in the block as part of this step: dropped with it."""
        inside = self.domain.inside
        before, inside.era = inside.era, self.era
        try:
            yield
        finally:
            inside.era = before

    def report_half_step(self) -> Era | None:
        """Set the failure that reports half-stepped weights, if an exception left any.

        Returns:
            The era that the report ends; None if there is nothing to report, because no optimizer
            was left in its step, or because all ranks have learned of half-stepped weights since.
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
            self.domain = fault_domain()
            self.domain.has_unreported_failure = True
            return self.domain.era

    @property
    def is_underway(self) -> bool:
        """True if the step is open, and nothing says that nobody will go on with it."""
        return self.is_open and not (self.is_abandoned or self.was_dropped)

    def check(self) -> None:
        """Raise the error of the fault, in an open step whose era a fault has ended."""
        if self.is_open:
            self.era.check()

    def left(self, place: str) -> None:
        """Record the place where an exception leaves the step; the innermost call comes first."""
        self.place = self.place or place

    def end(
        self, error: BaseException | None = None, *, failed: bool, trained: bool = False
    ) -> None:
        """End the step.

        Args:
            error: the exception that ended the step, if known.
            failed: True if an exception ended the step.
            trained: True if the step ended without an error and has computed gradients.
        """
        with _no_verdict_pending():
            was_open = self.is_open
            if failed and not self.was_dropped and not self.domain.is_of_abort(error):
                what = "an exception" if error is None else described(error)
                self.failed_at_s = time.monotonic()
                self.failure = Failure(f"{what}, {self.place}", self.failed_at_s)
                with _lock:
                    _failed.add(self)
                fault_domain().has_unreported_failure = True
            self.is_open = False
            if was_open and not failed:
                self.place = ""
                close_step(trained=trained and self._ends_for_all())

    def drop(self) -> None:
        """Close the step, which all ranks drop."""
        with _no_verdict_pending():
            self.is_open = False

    def _ends_for_all(self) -> bool:
        """Return whether this step is the last one of a training step of several engines.

        Ignore a step that was already open when this engine last trained: the output of its
        forward was discarded. Ranks collect such garbage at different times, and their ledgers
        must be alike.
        """
        beside = [step for step in steps() if step.is_open and step.domain is self.domain]
        before, self.beside = self.beside, frozenset(step.number for step in beside)
        if not self.beside <= before:
            return False
        for step in beside:
            step.is_abandoned = True
        return True

    @property
    def was_dropped(self) -> bool:
        """True if a fault ended the era of the last step."""
        return self.era.error is not None


def described(error: BaseException) -> str:
    """Return the last line of the traceback, with the file and line that raised the exception."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    return text + (f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else "")


verdict_pending = threading.RLock()  # a collected model may end its step in the thread of the watch
"""Held from reporting the status until the verdict: no step begins or ends in between, so that all
ranks know which step they drop."""

_VERDICT_S = 60.0  # seconds; a verdict takes less, unless the store's process is gone


@contextlib.contextmanager
def _no_verdict_pending() -> Iterator[None]:
    """Hold ``verdict_pending`` in the context; after ``_VERDICT_S`` enter it without."""
    is_free = verdict_pending.acquire(timeout=_VERDICT_S)
    try:
        yield
    finally:
        if is_free:
            verdict_pending.release()


_numbers = itertools.count(1)
_steps: weakref.WeakSet[Step] = weakref.WeakSet()
_lock = threading.Lock()
_failed: set[Step] = set()  # strong references: other ranks may wait for a step whose model is gone


def steps() -> list[Step]:
    """Return the steps of all engines of this process, and all steps with unreported failures."""
    with _lock:  # the main thread adds steps
        _failed.intersection_update([step for step in _failed if step.failure is not None])
        return list({*_steps, *_failed})


def forget_failures() -> None:
    """Forget the failures of an earlier job in this process."""
    for step in steps():
        step.failure = None
