"""The thread of each process that asks other ranks for their status, and answers when they ask.

Ranks communicate through the store of the default process group, not through training groups. A
rank asks for a round (``rounds``) when it waits for longer than its patience, when a wait fails, or
when an exception leaves a step. In a round all ranks report their status and read the same verdict.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path

import torch
import torch.distributed as dist

import fullshard.errors
from fullshard._torch import world as _world
from fullshard.comm.dry import world_lock
from fullshard.comm.fault_domain import fault_domain
from fullshard.comm.heartbeat import patience_s, start_heartbeat
from fullshard.comm.ledger import Ledger, ledgers
from fullshard.errors import FullshardError, LostRankError, PeerError, ProtocolError, TornStepError
from fullshard.watch.diagnosis import NOTHING, Diagnosis, Kind
from fullshard.watch.rounds import ANSWER_S, DIAGNOSE_S, Rounds
from fullshard.watch.status import GroupStatus, Issued, StatusReport
from fullshard.watch.step import Failure, Step, forget_failures, steps, verdict_pending

log = logging.getLogger("fullshard")

_TICK_S = 0.25
ASK_S = ANSWER_S + 2 * DIAGNOSE_S  # a round without a verdict by then has failed
_DESTROYED = "has destroyed its process group"
_FRAMES = 2  # of the stack, in a report


class Watcher:
    """The watch of one process over the job whose default process group is ``group``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world = group.rank(), group.size()
        self._group = weakref.ref(group)
        self._domain = fault_domain()
        self.failure: Failure | None = None
        """The exception that ends this program; None if there is none."""
        self.last = NOTHING
        """The diagnosis of the last round."""
        self.fault = ""
        """The text of the last fault; empty if there was none."""
        self._rounds = Rounds(self.rank, self.world)
        self._domain.era.name = self._rounds.last_fault
        # The start of the last wait that was asked about, and how often.
        self._last_ask: tuple[float, int] = (0.0, 0)
        self._wake = threading.Event()
        self._asks: list[threading.Event] = []
        self._is_cut_off = False  # True while the store is out of reach
        self._exit_lock = threading.Lock()
        self._has_reported_exit = False
        self._thread = threading.Thread(target=self._run, name="fullshard watch", daemon=True)

    def start(self) -> None:
        """Start to watch."""
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """True if no rank is watched: this rank exits, or the store is out of reach."""
        return self._rounds.is_over or self._is_cut_off

    def ask(self) -> None:
        """Ask for a round; return when it has ended, or after ``ASK_S``."""
        if self.is_over or threading.current_thread() is self._thread:
            return
        done = threading.Event()
        self._asks.append(done)
        self._wake.set()
        done.wait(ASK_S)

    def silent_since(self) -> dict[int, float]:
        """Return the silent ranks, with the start of their silence by ``time.monotonic``."""
        with contextlib.suppress(RuntimeError):  # the store may be gone
            return self._rounds.liveness.silent_since()
        return {}

    @property
    def is_current(self) -> bool:
        """True while the default process group of the job exists."""
        group = self._group()
        return group is not None and group is dist.group.WORLD

    def report_exit(self, reason: str) -> None:
        """Publish once why this rank exits, and stop watching."""
        self._rounds.is_over = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _TICK_S)
        with self._exit_lock:  # else a later job could delete the reason before it is published
            if not self._has_reported_exit:
                self._has_reported_exit = True
                with contextlib.suppress(RuntimeError):  # the store may be gone
                    self._rounds.report_exit(reason)

    def _run(self) -> None:
        try:
            while self._tick():
                self._wake.wait(_TICK_S)
                self._wake.clear()
        finally:
            self._rounds.is_over = True
            for done in self._asks:
                done.set()

    def _tick(self) -> bool:
        """Ask and answer once; return False when the watch has ended."""
        asks: list[threading.Event] = []
        with world_lock:  # a dry run replaces the default group
            if self._rounds.is_over:
                return False
            if not self.is_current:  # also if a reference still holds the group
                self.report_exit(_DESTROYED)
                return False
            asks, self._asks = self._asks, []
            try:
                if asks or self._is_impatient():
                    self._ask_all()
                self._answer_all()
                self._is_cut_off = False
            except RuntimeError as error:  # the store's process is gone or out of reach
                log.debug("the store cannot be reached: %s", error)
                self._is_cut_off = True
        for done in asks:
            done.set()
        return True

    def _ask_all(self) -> None:
        """Take part in a round that begins from now on; earlier reports may be out of date."""
        triggered = self._rounds.num_triggered
        self._answer_all()
        self._rounds.trigger(after=triggered)

    def _answer_all(self) -> None:
        """Take part in the rounds that have begun."""
        while (number := self._rounds.next_begun()) is not None:
            self._take_part(number)

    def _is_impatient(self) -> bool:
        """Return whether to ask about the longest wait; at growing intervals for the same wait."""
        waits = [wait for one in ledgers() if (wait := one.wait(patience_s())) is not None]
        if not waits:
            return False
        since_s, times = min(wait.since_s for wait in waits), 0
        if self._last_ask[0] == since_s:
            times = self._last_ask[1]
        if time.monotonic() - since_s < patience_s() * 2**times:
            return False
        self._last_ask = (since_s, times + 1)
        return True

    def _take_part(self, number: int) -> None:
        """Take part in round ``number``; every rank takes part in all rounds, in order."""
        with verdict_pending:
            status, failures = self._status()
            try:
                self._rounds.report(number, status)
                found = self._rounds.verdict(number)
            except RuntimeError:  # the store failed
                self._rounds.repeat(number)
                raise
            is_silent = self.rank in found.silent  # too slow: decided without its report
            is_behind = self.rank in found.behind or (is_silent and not status.is_open)
            self._note(number, found, is_behind=is_behind)
            for step, failure in failures:
                if found.kind is not Kind.UNDECIDED and step.failure is failure and not is_silent:
                    step.failure = None  # all ranks know it
        self.last = found  # after the era has ended, on which readers rely

    def _note(self, number: int, found: Diagnosis, *, is_behind: bool) -> None:
        """Log the diagnosis of round ``number``; after a fault end the era.

        One rank logs it at level ERROR, the first that reported; the other ranks at level INFO.
        ``is_behind``: this rank has not begun the step that the others drop.
        """
        if found.kind in (Kind.NOTHING, Kind.UNDECIDED):
            return
        first = min(set(range(self.world)).difference(found.silent), default=self.rank)
        log.log(logging.ERROR if self.rank == first else logging.INFO, "%s", found.text)
        if found.is_fault:
            self.fault = found.text
            self._domain.end_era(lambda: error_of(found), is_behind=is_behind, new_name=str(number))

    def _status(self) -> tuple[StatusReport, list[tuple[Step, Failure]]]:
        """Return the status of this rank, and the failed steps that need not be told again."""
        own = [step for step in steps() if step.domain is self._domain]  # not of an earlier job
        is_open = any(step.is_underway for step in own)
        failed = [(step, one) for step in own if (one := step.failure) is not None]
        # All ranks dropped the step of an ended era, even if this rank failed in it as well.
        news = [one for step, one in failed if one.is_half_stepped or not step.was_dropped]
        if self.failure is not None:
            news.insert(0, self.failure)
        failure = max(news, key=lambda one: one.is_half_stepped, default=Failure("", 0.0))
        report = StatusReport(
            self.rank,
            tuple(_group(ledger) for ledger in ledgers()),
            is_open,
            failure.text,
            time.monotonic() - failure.at_s,
            self._stack(),
            failure.is_half_stepped,
            failure is self.failure,
        )
        return report, failed

    def _stack(self) -> str:
        """Return the innermost frames of the main thread outside of PyTorch and fullshard."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None:
            return ""
        frames = [one for one in traceback.extract_stack(frame) if not _is_inner(one.filename)]
        return ", in ".join(
            f"{one.name} ({one.filename}:{one.lineno})" for one in reversed(frames[-_FRAMES:])
        )


def _is_inner(filename: str) -> bool:
    return filename.startswith(("<", *_INNER))


_INNER = tuple(
    str(Path(module.__file__ or "").parent) for module in (threading, torch, fullshard.errors)
)
"""The folders of Python's modules (which contain the installed ones), PyTorch and fullshard."""


def _group(ledger: Ledger) -> GroupStatus:
    current = ledger.era is ledger.domain.era
    wait = ledger.wait() if current else None
    number = wait.entry[0] if wait is not None else 0
    recent = tuple(ledger.entries) if current else ()
    if wait is not None and recent and number < recent[0][0]:
        recent = (wait.entry, *recent)  # the host is far ahead of the device
    return GroupStatus(
        ledger.name,
        ledger.ranks,
        ledger.num_issued if current else 0,
        tuple(Issued(*entry) for entry in recent),
        None if wait is None else number,
        0.0 if wait is None else time.monotonic() - wait.since_s,
        ledger.num_ended if current else 0,
        wait is not None and wait.on_device,
        ledger.num_closed if current else 0,
    )


def error_of(found: Diagnosis) -> FullshardError:
    """Return the error that the diagnosis ``found`` raises in the step."""
    if found.kind is Kind.APART:
        return ProtocolError(found.text)
    if found.kind is Kind.LOST:
        return LostRankError(found.text)
    if found.kind is Kind.HALF_STEPPED:
        return TornStepError(found.text)
    return PeerError(found.text)


_newest: Watcher | None = None


def newest() -> Watcher | None:
    """Return the watcher of this job or, after its end, of the last one; None before the first."""
    return _newest


def watcher() -> Watcher | None:
    """Return the watcher of this job; None if there is none."""
    return _newest if _newest is not None and _newest.is_current else None


_inherited: weakref.ref[dist.ProcessGroup] | None = None
"""The default process group of the process that forked this one; None if it had none."""


def _drop_in_child() -> None:
    """Drop the watcher in a forked child, where it would report in the name of the parent."""
    global _newest, _inherited
    group = dist.group.WORLD
    _newest, _inherited = None, None if group is None else weakref.ref(group)


os.register_at_fork(after_in_child=_drop_in_child)


def begin_watching() -> bool:
    """Start the watcher of this job, if none runs; return False if the job needs none."""
    global _newest
    if watcher() is not None:
        return True
    group = dist.group.WORLD
    if group is None or group.size() == 1 or (_inherited is not None and group is _inherited()):
        return False
    if not _world.reaches_processes(_world.default_store()):
        return False
    if _newest is not None:
        _newest.report_exit(_DESTROYED)
    forget_failures()
    start_heartbeat()
    _newest = Watcher(group)
    _newest.start()
    return True
