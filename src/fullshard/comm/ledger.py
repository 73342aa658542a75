"""Ledgers of issued collectives: what this process issued, where it waits, and how waits end.

A ledger belongs to one process group. When ranks wait for each other in vain, the room ``watch``
compares their ledgers to find the rank that left the common order. Until then the watch reads only
the current waits, and a collective costs one tuple and two assignments.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import torch.distributed as dist

from fullshard.comm.fault_domain import Era, fault_domain
from fullshard.comm.protocol import Pending
from fullshard.comm.underway import KEPT, Entry, Mark, Underway, Wait
from fullshard.errors import LostRankError, ProtocolError

RENDEZVOUS = "rendezvous"
"""The kind of collectives and waits in which ranks connect to each other."""

COMPARISON = "comparison"
"""The kind of waits in which ranks compare labels."""

TRANSFER = "transfer"
"""The kind of collectives that exchange objects or raw bytes by PyTorch's public functions."""

BETWEEN_STEPS = frozenset({TRANSFER, "save", "load", "list", "stream"})
"""The kinds of collectives between steps, when weights may have changed since the last backward."""


class Ledger:
    """The collectives that this process issued on one process group in this era."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks
        """The ranks of the group, numbered as in the job."""
        self.domain = fault_domain()
        """The fault domain of the job in which the ledger was made."""
        self.era = self.domain.era
        self.num_issued = 0
        self.num_closed = 0
        """The number of collectives issued before a step was last closed without an error."""
        self.num_ended = 0
        """The number of collectives issued before the last training step ended without an error."""
        self.entries: deque[Entry] = deque(maxlen=KEPT)
        self.waiting: Entry | None = None
        """The collective that the host waits for; None if it does not wait."""
        self.waiting_since_s = 0.0
        """The start of that wait, by ``time.monotonic``."""
        self.breaks: Callable[[Entry | None], None] | None = None
        """See ``Interruptible``."""
        self.aborts: Callable[[], None] | None = None
        """See ``Interruptible``."""
        self._underway = Underway()
        self.domain.add(self)

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
        domain = self.domain
        era = domain.enter()
        if self.era is not era:
            self._begin_era(era)
        if era.deferred_error is not None:
            era.raise_deferred()
        if self.aborts is not None:
            domain.refuse_aborted()
        entry = (self.num_issued, kind, label, nbytes)
        self.num_issued += 1
        self.entries.append(entry)
        try:
            pending = _Awaited(start(), entry, self)
        except Exception as error:
            if isinstance(error, LostRankError):  # the watch asks ranks that wait
                self.waiting_since_s, self.waiting = time.monotonic(), entry
            try:
                explained = self.explained(error, entry)
            finally:
                self.waiting = None
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
        self.era, self.num_issued, self.num_closed, self.num_ended = era, 0, 0, 0
        self.entries.clear()
        self._underway.clear()

    def explained(self, error: Exception, entry: Entry) -> Exception:
        """Return the error to raise for ``error``, which made ``entry`` fail."""
        explain = self.domain.explain
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


_lock = threading.Lock()
_ledgers: weakref.WeakKeyDictionary[object, Ledger] = weakref.WeakKeyDictionary()


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
    domain = fault_domain()
    with _lock:
        return [ledger for ledger in _ledgers.values() if ledger.domain is domain]


def close_step(*, trained: bool) -> None:
    """Record in all ledgers that a step was closed without an error; ``trained``: a training step.

    The training step may consist of steps of several engines: it ends with the last of them.
    """
    for ledger in ledgers():
        if ledger.era is ledger.domain.era:
            ledger.num_closed = ledger.num_issued
            if trained:
                ledger.num_ended = ledger.num_issued
