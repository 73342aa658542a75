"""Ledgers of issued collectives: what this process issued, where it waits, and how waits end.

A ledger belongs to one process group. When ranks wait for each other in vain, the room ``watch``
compares their ledgers to find the rank that left the common order. Until then the watch reads only
the current waits, and a collective costs one tuple and two assignments.

An *era* lasts from one fault to the next. All ranks of a job number the collectives of an era
alike. After a fault every rank ends its era: pending waits in that era raise the error of the
fault. In the next era numbers start from 0, and ranks connect to each other again.

Collectives on devices cannot be ended one by one, and their groups cannot connect again. So a fault
aborts the backend's communicators in all process groups that have such collectives, and no device
or host hangs in them. Results that devices compute from aborted collectives are useless.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import torch.distributed as dist

from fullshard.comm.protocol import Pending
from fullshard.comm.underway import KEPT, Entry, Mark, Underway, Wait
from fullshard.errors import ProtocolError, TornStepError

MEETING = "meeting"
"""The kind of collectives and waits in which ranks connect to each other."""

COMPARISON = "comparison"
"""The kind of waits in which ranks compare labels."""

TRANSFER = "transfer"
"""The kind of collectives that exchange objects or raw bytes by PyTorch's public functions."""

BETWEEN_STEPS = frozenset({TRANSFER, "save", "load", "list", "stream"})
"""The kinds of collectives between steps, when weights may have changed since the last backward."""


class Era:
    """The time between two faults."""

    def __init__(self) -> None:
        self.error: Callable[[], Exception] | None = None
        """Factory of the error of the fault that ended the era; None while the era lasts."""
        self.deferred_error: Callable[[], Exception] | None = None
        """Factory of the error to raise at the next step, which the other ranks have already
        dropped; None: no error is deferred."""
        self._lock = threading.Lock()
        self._pipe: tuple[int, int] | None = None  # made when needed: processes may fork before

    def fileno(self) -> int:
        """Return a file descriptor that is readable once the era has ended."""
        with self._lock:
            if self._pipe is None:
                self._pipe = os.pipe()
                weakref.finalize(self, _close, self._pipe)
                self._wake()
            return self._pipe[0]

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
        """Clear the deferred error: ranks agreed on the next step, or a new job began."""
        self.deferred_error = None

    def end(self, error: Callable[[], Exception]) -> None:
        """End the era and wake the threads that wait in it; call this once, from any thread."""
        with self._lock:
            self.error = error
            self._wake()

    def _wake(self) -> None:
        if self._pipe is not None and self.error is not None:
            os.write(self._pipe[1], b".")  # never read, so it wakes every thread that polls


def _close(fds: tuple[int, int]) -> None:
    for fd in fds:
        os.close(fd)


class Ledger:
    """The collectives that this process issued on one process group in this era."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks
        """The ranks of the group, numbered as in the job."""
        self.job = _job()
        self.era = now()
        self.num_issued = 0
        self.num_ended = 0
        """The number of collectives issued before the last training step ended without an error."""
        self.entries: deque[Entry] = deque(maxlen=KEPT)
        self.waiting: Entry | None = None
        """The collective that the host waits for; None if it does not wait."""
        self.waiting_since_s = 0.0
        """The start of that wait, by ``time.monotonic``."""
        self.breaks: Callable[[Entry, Exception], None] | None = None
        """Function of the awaited entry and the fault's error, for waits that do not poll the era.

        If the error leaves the wait without an end, the function makes the wait raise a
        ``RuntimeError``, at the cost of the transport."""
        self.aborts: Callable[[], None] | None = None
        """Function that aborts all device collectives, and so the group; None: there are none."""
        self._underway = Underway()

    def issue(
        self,
        kind: str,
        label: str,
        nbytes: int,
        start: Callable[[], Pending],
        mark: Callable[[], Mark | None] | None = None,
    ) -> Pending:
        """Start a collective and return its ``Pending``.

        Args:
            kind, label, nbytes: as in ``Entry``.
            start: starts the collective.
            mark: for collectives on a device: returns a mark behind the device's last work, or
                None if no mark can be set.

        Raises:
            PeerError: the collective cannot end, since another rank failed; ``wait`` may raise
                the same.
            ProtocolError: an earlier fault has ended the process group.
        """
        if unsettled and settle is not None:
            settle()
        era, inside = _era, within.era
        if inside is not None and inside is not era:
            inside.check()
        if self.era is not era:
            self._begin_era(era)
        if era.deferred_error is not None:
            era.raise_deferred()
        if self.aborts is not None:
            _refuse_ended()
        entry = (self.num_issued, kind, label, nbytes)
        self.num_issued += 1
        self.entries.append(entry)
        try:
            pending = _Awaited(start(), entry, self)
        except Exception as error:
            explained = self.explained(error, entry)
            if explained is error:
                raise
            raise explained from error
        if mark is not None and (point := mark()) is not None:
            self._underway.add(entry, point)
        return pending

    def wait(self, least_s: float = 0.0) -> Wait | None:
        """Return the wait of the host, or else that of the device; None if neither waits.

        Args:
            least_s: for a wait of the device: seconds since the collective was issued, at least.
        """
        waiting = self.waiting
        if waiting is not None:
            return Wait(waiting, self.waiting_since_s, on_device=False)
        return self._underway.first(least_s)

    @property
    def is_meeting(self) -> bool:
        """True if the host waits to connect to other ranks, perhaps since an earlier era."""
        waiting = self.waiting
        return waiting is not None and waiting[1] == MEETING

    def starting(self, kind: str) -> contextlib.AbstractContextManager[None]:
        """Record that in the block the host waits for ranks of the group to start a collective.

        The collective is the one that was issued last; ``kind`` says what the host does for it.
        """
        return self.awaiting((max(0, self.num_issued - 1), kind, "", 0))

    @contextlib.contextmanager
    def awaiting(self, entry: Entry) -> Iterator[None]:
        """Record that the host waits for ``entry`` in the block."""
        self.waiting_since_s = time.monotonic()
        self.waiting = entry
        try:
            self.era.check()
            yield
        finally:
            self.waiting = None

    def _begin_era(self, era: Era) -> None:
        self.era, self.num_issued, self.num_ended = era, 0, 0
        self.entries.clear()
        self._underway.clear()

    def explained(self, error: Exception, entry: Entry) -> Exception:
        """Return the error to raise for ``error``, which made ``entry`` fail."""
        return error if explain is None else explain(error, self, entry)


class _Awaited:
    """A collective whose wait the watch can see and end.

    After a failed wait, later waits raise at once: a collective that failed half-way may never end.
    """

    __slots__ = ("_entry", "_era", "_failure", "_ledger", "_pending")

    def __init__(self, pending: Pending, entry: Entry, ledger: Ledger) -> None:
        self._pending = pending
        self._entry = entry
        self._ledger = ledger
        self._era = ledger.era
        self._failure = ""  # text, as an exception would keep the frames of its traceback

    def wait(self) -> None:
        """See ``Pending``."""
        if self._failure:
            kind = self._entry[1]
            raise ProtocolError(
                f"this {kind} cannot be waited for again: an earlier wait failed with "
                f"{self._failure}"
            )
        ledger = self._ledger
        ledger.waiting_since_s = time.monotonic()
        ledger.waiting = self._entry
        try:
            self._era.check()  # after the wait is recorded: a later fault ends it
            self._pending.wait()
        except Exception as error:
            explained = ledger.explained(error, self._entry)
            self._failure = f"{type(explained).__name__}: {explained}"
            if explained is error:
                raise
            raise explained from error
        finally:
            ledger.waiting = None


explain: Callable[[Exception, Ledger, Entry], Exception] | None = None
"""Function that finds out why a collective failed and returns the error to raise; set by the watch.
None: there is no watch."""

unsettled = False
"""True if an exception ended a step of this process, in which other ranks may wait."""

settle: Callable[[], None] | None = None
"""Function that finds out whether other ranks wait, and ends the era if they do, before another
collective is issued; set by the watch. None: there is no watch."""


class _Within(threading.local):
    era: Era | None = None


within = _Within()
"""``within.era`` is the era of the step that runs in this thread; None outside of steps. The engine
sets it. If a fault has ended that era, collectives and steps must not start in the next one. The
variable is thread-local, because ranks may be threads of one process."""

# The last job whose process groups a fault has ended, and the factory of the error of that fault.
_ended: tuple[weakref.ref[dist.ProcessGroup] | None, Callable[[], Exception]] | None = None
_is_raised = False  # whether a collective was refused with that error

_era = Era()
_lock = threading.Lock()
_ledgers: weakref.WeakKeyDictionary[object, Ledger] = weakref.WeakKeyDictionary()


def now() -> Era:
    """Return the current era."""
    return _era


def ledger_of(group: dist.ProcessGroup) -> Ledger:
    """Return the ledger of ``group``; the first call makes the ledger."""
    with _lock:
        if group not in _ledgers:
            ranks = tuple(dist.get_process_group_ranks(group))
            _ledgers[group] = Ledger(group.group_name, ranks)
        return _ledgers[group]


def ledger_beside(holder: object, name: str) -> Ledger:
    """Return a new ledger, owned by ``holder``, of joint work without a process group."""
    with _lock:
        ledger = _ledgers[holder] = Ledger(name, tuple(range(dist.get_world_size())))
    return ledger


def ledgers() -> list[Ledger]:
    """Return the ledgers of the groups of this job.

    On this rank alone, a reference may still hold a group of an earlier job with the same name.
    """
    job = _job()
    with _lock:
        return [ledger for ledger in _ledgers.values() if ledger.job == job]


def end_step() -> None:
    """Record in all ledgers that a training step ended without an error."""
    for ledger in ledgers():
        if ledger.era is _era:
            ledger.num_ended = ledger.num_issued


def _job() -> weakref.ref[dist.ProcessGroup] | None:
    """Return a reference to the default group, which identifies the job; None: there is no job."""
    group = dist.group.WORLD
    return None if group is None else weakref.ref(group)


def end_era(error: Callable[[], Exception], *, is_behind: bool = False) -> None:
    """End the era by a fault, and begin the next one.

    Args:
        error: the factory of the fault's error.
        is_behind: True if other ranks drop a step that this rank has not begun.
    """
    global _era, _ended, _is_raised
    last, new = _era, Era()
    new.deferred_error = error if is_behind else None
    _era = new
    aborts = [one.aborts for one in ledgers() if one.aborts is not None]
    if aborts and ended_by() is None:
        _ended, _is_raised = (_job(), error), False  # before any wait ends
    last.end(error)
    for ledger in ledgers():
        waiting = ledger.waiting
        # Waits of an earlier era, too: only a lost rank ends a meeting.
        if waiting is not None and ledger.breaks is not None:
            ledger.breaks(waiting, error())
    for abort in aborts:
        abort()


def ended_by() -> Callable[[], Exception] | None:
    """Return the factory of the error that aborted this job's groups, or None.

    The groups of an earlier job do not count.
    """
    return _ended[1] if _ended is not None and _ended[0] == _job() else None


def check_ended() -> None:
    """Raise the error of the fault, if a fault has aborted groups of this job."""
    error = ended_by()
    if error is not None:
        raise error()


def _refuse_ended() -> None:
    """Refuse a collective on a group that a fault has aborted.

    Raise the original fault once, then a ``ProtocolError``.
    """
    global _is_raised
    error = ended_by()
    if error is None:
        return
    was_raised, _is_raised = _is_raised, True
    if not was_raised:
        raise error()
    raise ProtocolError(
        f"{error()}. This fault has aborted the process groups of devices, so that no rank hangs; "
        "continue in new process groups, as fullshard.resilient does, or end the program"
    ) from error()
