"""Reports failures of this process to the other ranks: of collectives, of steps, of the program."""

from __future__ import annotations

import atexit
import functools
import sys
import time
from collections.abc import Callable
from types import TracebackType

from fullshard.comm.fault_domain import fault_domain
from fullshard.comm.heartbeat import patience_s
from fullshard.comm.ledger import Entry, Ledger
from fullshard.errors import LostRankError, PeerError, TornStepError
from fullshard.watch.diagnosis import UNDECIDED, Kind
from fullshard.watch.step import Failure, Step, described, steps
from fullshard.watch.watcher import ASK_S, Watcher, begin_watching, newest, watcher

__all__ = ["await_verdict", "begin", "explain", "report_failure", "report_half_step"]

_PAUSE_S = 0.02


def explain(error: Exception, of: Ledger, entry: Entry) -> Exception:
    """Return the error of the fault that made collective ``entry`` fail, or else ``error``."""
    watching = watcher()
    if of.era.error is None and watching is not None:
        watching.last = UNDECIDED
        # A lost connection may be seen just before its process ends: ask until the fault is known.
        is_lost = isinstance(error, LostRankError)
        _ask_until(
            watching,  # the round that finds the fault may be followed by another
            lambda: (
                of.era.error is not None or not (is_lost or watching.last.kind is Kind.UNDECIDED)
            ),
        )
    if of.era.error is None:
        return error
    of.domain.raised(of.era)
    return error if isinstance(error, PeerError) and error.args == _text(of) else of.era.error()


def _text(of: Ledger) -> tuple[object, ...]:
    assert of.era.error is not None
    return of.era.error().args


def await_verdict() -> None:
    """Report failed steps to the other ranks and wait for the verdict.

    Call this before a step begins or a collective is issued. Either all ranks failed at the same
    place, or the other ranks learn of the failure and drop the step.
    """
    watching, domain = watcher(), fault_domain()
    if not domain.has_unreported_failure or watching is None:
        return
    domain.has_unreported_failure = False
    _ask_until(watching, lambda: not any(step.failure for step in steps()))


def report_half_step(step: Step) -> Exception | None:
    """Report to all ranks if an exception left the weights of ``step`` half-stepped here.

    Returns:
        The error that all ranks raise; None if there is nothing to report.
    """
    era = step.report_half_step()
    if era is None:
        return None
    failure = step.failure
    await_verdict()
    step.failure = None
    fault_domain().era.clear_deferred()
    if era.error is not None:
        return era.error()
    text = "an exception" if failure is None else failure.text  # the watch is over
    return TornStepError(f"this rank failed: {text}. Load a checkpoint on all ranks")


def _ask_until(watching: Watcher, is_known: Callable[[], bool]) -> None:
    """Ask for rounds until ``is_known`` returns True, or patience ends."""
    until_s = time.monotonic() + patience_s() + ASK_S
    while not (is_known() or watching.is_over) and time.monotonic() < until_s:
        watching.ask()
        time.sleep(_PAUSE_S)


def report_failure(error: Exception) -> None:
    """Report an exception that ends this rank's work; return once the other ranks know it."""
    watching = watcher()
    if watching is None or str(error) == watching.fault:  # otherwise all ranks know it
        return
    places = [step.place for step in steps() if step.place]
    text = ", ".join([described(error), *places[:1]])
    watching.failure = Failure(text, time.monotonic())
    watching.last, era = UNDECIDED, fault_domain().era
    _ask_until(watching, lambda: era.error is not None or watching.last.kind is not Kind.UNDECIDED)


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Report an exception that ends this program to the other ranks, then to the user."""
    watching = watcher()
    if watching is not None and isinstance(error, Exception):
        report_failure(error)
        failure = watching.failure
        watching.report_exit(f"exited with {described(error) if failure is None else failure.text}")
    _previous_hook(kind, error, trace)


def _report_exit() -> None:
    watching = newest()  # a program that exits normally has destroyed its group
    if watching is not None:
        watching.report_exit("exited")


_previous_hook = sys.excepthook


@functools.cache
def _install_hooks() -> None:
    """Install the hooks for the exit of the program, once."""
    global _previous_hook
    _previous_hook, sys.excepthook = sys.excepthook, _excepthook
    atexit.register(_report_exit)


def begin() -> None:
    """Watch the job from now on, until its default process group is destroyed."""
    if begin_watching():
        domain = fault_domain()
        domain.explain, domain.await_verdict = explain, await_verdict
        _install_hooks()
