"""The fault domain of a job: its current era, and the collectives that a fault ends.

An *era* lasts from one fault to the next. All ranks of a job number the collectives of an era
alike. After a fault every rank ends its era: pending waits in that era raise the error of the
fault. In the next era numbers start from 0, and ranks connect to each other again.

Collectives on devices cannot be ended one by one, and their groups cannot connect again. So a fault
aborts the backend's communicators in all process groups that have such collectives, and no device
or host hangs in them. Results that devices compute from aborted collectives are useless.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist

from fullshard.comm.underway import Entry
from fullshard.errors import ProtocolError, TornStepError

__all__ = ["Era", "FaultDomain", "Interruptible", "fault_domain"]

log = logging.getLogger(__name__)


class Era:
    """The time between two faults."""

    def __init__(self, name: str = "0") -> None:
        self.name = name
        """The name of the era, the same on all ranks of the job."""
        self.error: Callable[[], Exception] | None = None
        """Factory of the error of the fault that ended the era; None while the era lasts."""
        self.deferred_error: Callable[[], Exception] | None = None
        """Factory of the error to raise at the next step, which the other ranks have already
        dropped; None: no error is deferred."""
        self._lock = threading.Lock()
        self._fd: int | None = None  # made when needed: processes may fork before

    def fileno(self) -> int:
        """Return a file descriptor that is readable once the era has ended."""
        with self._lock:
            if self._fd is None:
                self._fd = os.eventfd(int(self.error is not None), os.EFD_CLOEXEC)
                weakref.finalize(self, os.close, self._fd)
            return self._fd

    def check(self) -> None:
        """Raise the error of the fault, if the era has ended."""
        if self.error is not None:
            raise self.error()

    @property
    def is_half_stepped(self) -> bool:
        """True if the fault that ended the era left the weights half-stepped."""
        return self.error is not None and isinstance(self.error(), TornStepError)

    def raise_deferred(self) -> None:
        """Raise the deferred error, once, if there is one."""
        error, self.deferred_error = self.deferred_error, None
        if error is not None:
            raise error()

    def clear_deferred(self) -> None:
        """Clear the deferred error: the ranks have agreed on the next step."""
        self.deferred_error = None

    def end(self, error: Callable[[], Exception]) -> None:
        """End the era and wake the threads that wait in it; call this once, from any thread."""
        with self._lock:
            self.error = error
            if self._fd is not None:
                os.eventfd_write(self._fd, 1)  # never read, so it wakes every thread that polls


class Interruptible(Protocol):
    """The collectives of one process group, as far as a fault ends them: a ``Ledger``."""

    waiting: Entry | None
    """The collective that the host waits for; None if it does not wait."""
    breaks: Callable[[Entry | None], None] | None
    """Function that ends a wait which does not poll the era; None: there are no such waits.

    It takes the awaited entry, perhaps of an earlier era, and makes the wait raise a
    ``RuntimeError``, after which the transport is unusable, unless the wait ends by itself.
    """
    aborts: Callable[[], None] | None
    """Function that aborts all device collectives, and so the group; None: there are none."""


class _Inside(threading.local):
    era: Era | None = None


class FaultDomain:
    """The era and the aborted groups of one job, shared by ledgers, the watch and engines.

    Attributes:
        era: the current era.
        has_unreported_failure: True if an exception ended a step of this process, in which other
            ranks may wait.
        explain: function that finds out why a collective failed and returns the error to raise; set
            by the watch. None: there is no watch.
        await_verdict: function that finds out whether other ranks wait, and ends the era if they
            do; set by the watch. None: there is no watch.
        inside: ``inside.era`` is the era of the step that runs in this thread; None outside of
            steps. If a fault has ended that era, collectives and steps must not start in the next
            one. The engine sets it. Ranks may be threads of one process, so it is thread-local.
        training_thread: the thread that began the last step; None before the first.
        aborted_by: factory of the error of the fault that aborted the groups of devices; None if
            none did.
    """

    def __init__(self) -> None:
        self.era = Era()
        self.has_unreported_failure = False
        self.explain: Callable[[Exception, Any, Entry], Exception] | None = None
        self.await_verdict: Callable[[], None] | None = None
        self.inside = _Inside()
        self.training_thread: int | None = None
        self.aborted_by: Callable[[], Exception] | None = None
        self._is_raised = False  # whether a collective was refused with that error
        self._members: weakref.WeakSet[Interruptible] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, member: Interruptible) -> None:
        """Register ``member``: faults end its collectives for as long as it lives."""
        with self._lock:
            self._members.add(member)

    def enter(self) -> Era:
        """Return the era of a collective that is issued now, in this thread.

        Raises:
            FullshardError: a fault has ended the step that runs in this thread.
        """
        if self.has_unreported_failure and self.await_verdict is not None:
            self.await_verdict()
        era, inside = self.era, self.inside.era
        if inside is not None and inside is not era:
            inside.check()
        return era

    def end_era(
        self, error: Callable[[], Exception], *, is_behind: bool = False, new_name: str = ""
    ) -> None:
        """End the era by a fault, and begin the next one.

        Args:
            error: the factory of the fault's error.
            is_behind: True if other ranks drop a step that this rank has not begun.
            new_name: the name of the new era; empty: derived from the name of the last one.
        """
        last = self.era
        new = Era(new_name or f"{last.name}+")
        new.deferred_error = error if is_behind else None
        with self._lock:
            members = list(self._members)
        aborts = [one.aborts for one in members if one.aborts is not None]
        if aborts and self.aborted_by is None:
            self.aborted_by = error  # before any wait ends
        with self._lock:
            last.end(error)  # first, so that nothing of the ended step begins in the next era
            self.era = new
        ends: list[Callable[[], None]]
        ends = [partial(end, one.waiting) for one in members if (end := one.breaks) is not None]
        for act in [*ends, *aborts]:
            try:
                act()
            except Exception:  # such as no thread left: the other waits must end all the same
                log.exception("collectives could not be ended after a fault")

    def raised(self, era: Era) -> None:
        """Note that this thread raises the error that ended ``era``.

        The thread that trains need not raise it again when the next step begins.
        """
        is_training = self.training_thread in (None, threading.get_ident())
        with self._lock:
            if is_training and self.era.deferred_error is era.error:
                self.era.clear_deferred()

    def check_aborted(self) -> None:
        """Raise the error of the fault, if a fault has aborted groups of this job."""
        if self.aborted_by is not None:
            raise self.aborted_by()

    def is_of_abort(self, error: BaseException | None) -> bool:
        """Return whether ``error`` says that a fault has aborted groups of this job."""
        return self.aborted_by is not None and str(self.aborted_by()) in str(error)

    def refuse_aborted(self) -> None:
        """Refuse a step, or a collective on a group, if a fault has aborted groups of this job.

        Raises:
            FullshardError: the error of the fault, at the first call.
            ProtocolError: at later calls.
        """
        error = self.aborted_by
        if error is None:
            return
        was_raised, self._is_raised = self._is_raised, True
        if not was_raised:
            raise error()
        raise ProtocolError(
            f"{error()}. This fault has aborted the process groups of devices, so that no rank "
            "hangs; continue in new process groups, as fullshard.resilient does, or end the program"
        ) from error()


_domains: weakref.WeakKeyDictionary[dist.ProcessGroup, FaultDomain] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_of_no_job = FaultDomain()


def fault_domain() -> FaultDomain:
    """Return the fault domain of this job: that of its default process group, or of no group."""
    group = dist.group.WORLD
    if group is None:
        return _of_no_job
    found = _domains.get(group)
    if found is None:
        with _lock:
            found = _domains.setdefault(group, FaultDomain())
    return found
