"""What this process issued on each of its process groups, where it waits, and what ends waits.

When ranks wait for each other in vain, they compare these ledgers to find out who left the order
(room ``watch``). Until then nobody reads them: a collective costs one tuple and two assignments.

An *era* lasts from one fault to the next. All ranks of a job count the collectives of an era alike.
When a fault was found, every rank ends its era: whatever was issued in it, and is still waited for,
raises the error of the fault, and later collectives are counted and connected anew.

Collectives of devices cannot be ended one by one, nor connected anew. A fault ends the process
groups that have any: the backend's communicators are aborted, so that neither a device nor a host
that waits for it stays behind. What devices have computed from them since is of no use.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch.distributed as dist

from fullshard import _torch
from fullshard.comm.protocol import Pending
from fullshard.errors import ProtocolError, TornStepError

KEPT = 32
"""Collectives of each group that a ledger remembers."""

MEETING = "meeting"
"""The kind of a collective, and of a wait, by which ranks connect to each other."""

COMPARISON = "comparison"
"""The kind of a wait for ranks to compare labels with."""

TRANSFER = "transfer"
"""The kind of collectives by PyTorch's public functions, of objects and of raw bytes."""

BETWEEN_STEPS = frozenset({TRANSFER, "save", "load", "list", "stream"})
"""Kinds of what ranks do together when weights may have been stepped since the last backward."""


Entry = tuple[int, str, str, int]
"""A collective that this process issued: its number among those of the group in this era, from 0,
its kind, its label (may be empty), and the bytes that this rank contributes. A plain tuple, which
the garbage collector soon leaves alone."""


class Mark(Protocol):
    """A point in the work of a device, such as an event."""

    def query(self) -> bool:
        """Return whether the device has passed it; never blocks."""


class Wait(NamedTuple):
    """What this process waits for."""

    entry: Entry
    since_s: float
    """Since when, by ``time.monotonic``."""
    on_device: bool
    """True if the device does, and the host may have gone on."""


class Era:
    """The time between two faults."""

    def __init__(self) -> None:
        self.error: Callable[[], Exception] | None = None
        """Makes the error of the fault that ended the era; None while it lasts."""
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
                self._tell()
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
        """End the era and wake those who wait in it; from any thread, once."""
        with self._lock:
            self.error = error
            self._tell()

    def _tell(self) -> None:
        if self._pipe is not None and self.error is not None:
            os.write(self._pipe[1], b".")  # nobody reads it, so all who poll are woken


def _close(fds: tuple[int, int]) -> None:
    for fd in fds:
        os.close(fd)


class _Underway:
    """Collectives that were issued to a device, which may not have done them.

    A host may be ahead of its device by any number of them, and the oldest may be the one that
    hangs. Marks are removed once the device has passed them, so the host checks them when many
    pile up.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[Entry, Mark, float]] = deque()
        self._most = KEPT  # marks; with more, the host checks them
        self._first: tuple[Entry | None, float] = (None, 0.0)  # the oldest; when it was first seen
        self._removing = threading.Lock()  # the host and the watch may see one mark passed

    def add(self, entry: Entry, mark: Mark) -> None:
        """Add a collective, and the mark behind it."""
        self._marks.append((entry, mark, time.monotonic()))
        if len(self._marks) > self._most:
            self.first()
            self._most = max(KEPT, 2 * len(self._marks))

    def clear(self) -> None:
        """Forget all."""
        self._marks.clear()

    def first(self, least_s: float = 0.0) -> Wait | None:
        """Return the first that is not done, if it was issued ``least_s`` ago or earlier.

        Older marks that the device has passed are dropped. The wait starts when this collective was
        first seen as the oldest, not when it was issued.
        """
        with contextlib.suppress(IndexError), _torch.beside_captures() as may_ask:
            while may_ask:  # another thread adds and clears meanwhile
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


class Ledger:
    """What this process issued on one process group in this era."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks
        """The members, by their ranks in the job."""
        self.job = _job()
        self.era = now()
        self.num_issued = 0
        self.num_ended = 0
        """How many had been issued when the last step of training ended well."""
        self.entries: deque[Entry] = deque(maxlen=KEPT)
        self.waiting: Entry | None = None
        """What the host waits for at the moment."""
        self.waiting_since_s = 0.0
        self.breaks: Callable[[Entry, Exception], None] | None = None
        """Makes a wait that sees no era raise a ``RuntimeError``, at the cost of its transport, if
        the error of the fault, the second argument, leaves the wait no end."""
        self.aborts: Callable[[], None] | None = None
        """Ends all collectives of devices, and the group with them; None: it has none."""
        self._underway = _Underway()

    def issue(
        self,
        kind: str,
        label: str,
        nbytes: int,
        start: Callable[[], Pending],
        mark: Callable[[], Mark | None] | None = None,
    ) -> Pending:
        """Start a collective and return what waits for it.

        Args:
            kind, label, nbytes: as in ``Entry``.
            start: starts it.
            mark: for collectives of a device: returns a mark behind what was issued there last, or
                None where there can be none.

        Raises:
            PeerError: it cannot end, since another rank failed, and so in ``wait``.
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
        """Return what the host waits for, or else the device; for those who watch.

        Args:
            least_s: how many seconds ago it must have been issued, if the device waits for it.
        """
        waiting = self.waiting
        if waiting is not None:
            return Wait(waiting, self.waiting_since_s, on_device=False)
        return self._underway.first(least_s)

    @property
    def is_meeting(self) -> bool:
        """True if the host waits to meet other ranks, perhaps since an earlier era."""
        waiting = self.waiting
        return waiting is not None and waiting[1] == MEETING

    def starting(self, kind: str) -> contextlib.AbstractContextManager[None]:
        """Show that the host waits in the block for ranks of the group, to start a collective.

        It is the one that was issued last, and ``kind`` says what the host does for it.
        """
        return self.awaiting((max(0, self.num_issued - 1), kind, "", 0))

    @contextlib.contextmanager
    def awaiting(self, entry: Entry) -> Iterator[None]:
        """Show that the host waits in the block for ``entry``."""
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
        """Return what to raise for ``error``, which ``entry`` ended by."""
        return error if explain is None else explain(error, self, entry)


def _is_passed(mark: Mark) -> bool:
    try:
        return mark.query()
    except RuntimeError:  # the device is broken, which whoever uses it learns
        return True


class _Awaited:
    """A collective whose wait can be seen, and ended, by those who watch.

    After a wait that failed, later ones raise at once: what failed half-way may never end.
    """

    __slots__ = ("_entry", "_era", "_failure", "_ledger", "_pending")

    def __init__(self, pending: Pending, entry: Entry, ledger: Ledger) -> None:
        self._pending = pending
        self._entry = entry
        self._ledger = ledger
        self._era = ledger.era
        self._failure = ""  # in words: an exception would keep the stack that it left

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
            self._era.check()  # only now: a fault that comes later ends the wait
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
"""Finds out why a collective failed, and returns what to raise instead; set by who watches."""

unsettled = False
"""True if an exception ended a step of this process, and other ranks may wait in it."""

settle: Callable[[], None] | None = None
"""Finds out whether they do, and ends the era then, before anything else is issued; set by who
watches."""


class _Within(threading.local):
    era: Era | None = None


within = _Within()
"""Its ``era`` is that of the step which runs or issues something in this thread at the moment, if
one does; set by who drives it. If a fault has ended it, what begins or is issued now must not count
in the next. Ranks that are threads would leave each other's behind in one variable."""

# The last job of which a fault has ended process groups, and what makes the error of that fault.
_ended: tuple[weakref.ref[dist.ProcessGroup] | None, Callable[[], Exception]] | None = None
_is_told = False  # whether a collective was refused with that error

_era = Era()
_lock = threading.Lock()
_ledgers: weakref.WeakKeyDictionary[object, Ledger] = weakref.WeakKeyDictionary()


def now() -> Era:
    """Return the era that lasts."""
    return _era


def ledger_of(group: dist.ProcessGroup) -> Ledger:
    """Return the ledger of ``group``, made at the first call."""
    with _lock:
        if group not in _ledgers:
            ranks = tuple(dist.get_process_group_ranks(group))
            _ledgers[group] = Ledger(group.group_name, ranks)
        return _ledgers[group]


def ledger_beside(holder: object, name: str) -> Ledger:
    """Return a new ledger of what all ranks do together without a group; ``holder`` keeps it."""
    with _lock:
        ledger = _ledgers[holder] = Ledger(name, tuple(range(dist.get_world_size())))
    return ledger


def ledgers() -> list[Ledger]:
    """Return the ledgers of the groups of this job.

    Something may still hold a group of an earlier job, on this rank only, under the same name.
    """
    job = _job()
    with _lock:
        return [ledger for ledger in _ledgers.values() if ledger.job == job]


def end_step() -> None:
    """Take note, on the ledgers of all groups, that a step of training ended well."""
    for ledger in ledgers():
        if ledger.era is _era:
            ledger.num_ended = ledger.num_issued


def _job() -> weakref.ref[dist.ProcessGroup] | None:
    """Return what tells this job from others of the same process: its default group."""
    group = dist.group.WORLD
    return None if group is None else weakref.ref(group)


def end_era(error: Callable[[], Exception], *, is_behind: bool = False) -> None:
    """End the era by a fault, which ``error`` makes the error of, and begin the next.

    Args:
        error: makes the error.
        is_behind: True if other ranks drop a step that this one has not begun.
    """
    global _era, _ended, _is_told
    last, new = _era, Era()
    new.deferred_error = error if is_behind else None
    _era = new
    aborts = [one.aborts for one in ledgers() if one.aborts is not None]
    if aborts and ended_by() is None:
        _ended, _is_told = (_job(), error), False  # before any wait ends by it
    last.end(error)
    for ledger in ledgers():
        waiting = ledger.waiting
        # Of an earlier era, too: only a lost rank ends a meeting.
        if waiting is not None and ledger.breaks is not None:
            ledger.breaks(waiting, error())
    for abort in aborts:
        abort()


def ended_by() -> Callable[[], Exception] | None:
    """Return what makes the error of the fault that ended process groups of this job, if one did.

    Those of an earlier job are no concern of this one, nor of a process that goes on alone.
    """
    return _ended[1] if _ended is not None and _ended[0] == _job() else None


def check_ended() -> None:
    """Raise the error of the fault that ended process groups of this job, if one did."""
    error = ended_by()
    if error is not None:
        raise error()


def _refuse_ended() -> None:
    """Refuse a collective on a group that a fault has ended.

    The first time by the error of the fault; who catches that and tries again has to know better.
    """
    global _is_told
    error = ended_by()
    if error is None:
        return
    was_told, _is_told = _is_told, True
    if not was_told:
        raise error()
    raise ProtocolError(
        f"{error()}. This fault has ended the process groups of devices, so that no rank waits "
        "for ever; go on in new ones, as fullshard.resilient does, or end the program"
    ) from error()
