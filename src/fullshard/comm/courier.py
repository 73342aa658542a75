"""Who carries exchanges on: the thread that waits for one, else a thread for what is not at rest.

What a socket takes at once needs no thread. A thread of our own runs only while bytes do not fit
into sockets, or while others need this rank although its own threads compute.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from queue import Empty

from torch import Tensor

from fullshard.comm.crossing import Crossing
from fullshard.comm.fault_domain import fault_domain
from fullshard.comm.links import Trouble
from fullshard.comm.office import Office
from fullshard.errors import LostRankError, ProtocolError

__all__ = ["Courier"]

_LINGER_S, _LINGER_TURNS = 1.0, 20
"""Seconds that the thread waits for something to do before it ends."""
_TURN_S = 1.0
_LOOK_S = 0.25  # between two looks at whether a fault has ended the era
_FAREWELL_S = 30.0
"""Seconds without progress after which a leaving rank gives up what others still need."""


class Courier:
    """Lets one thread at a time carry on the exchanges of an ``Office``."""

    def __init__(self, office: Office, timeout_s: float) -> None:
        self._office = office
        self._timeout_s = timeout_s
        self._era = fault_domain().era
        self._seat = threading.Lock()  # held by the thread that carries exchanges on
        self._failure: Exception | None = None  # what left the office in the middle of a step
        self._waiting: set[object] = set()  # one for each thread that waits for an exchange
        self._lock = threading.RLock()  # guards what follows; garbage collection may close
        self._thread: threading.Thread | None = None
        self._called = threading.Event()
        self._is_closing = False

    def start(self, *crossings: Crossing) -> None:
        """Start exchanges; what sockets take at once is sent.

        Raises:
            ProtocolError: an earlier exception ended all exchanges of this rank.
        """
        self._check()
        self._office.starting.extend(crossings)
        if self._seat.acquire(blocking=False):
            try:
                self._step(0)
            finally:
                self._seat.release()
            self._leave()
        else:
            self._office.bell.ring()

    def finds(self, crossing: Crossing) -> Iterator[tuple[int, Tensor | None]]:
        """Yield whose data ``crossing`` found, and the data unless it is where it should be.

        Raises:
            ProtocolError: if a rank runs a different collective, or an exception ended all
                exchanges of this rank.
            LostRankError: if a rank is gone, or all are silent for the group's time-out.
            PeerError: the error of the fault that ended the era.
        """
        me = object()
        self._waiting.add(me)  # before the seat is tried: whoever leaves it looks here afterwards
        try:
            for _ in range(crossing.num_finds):
                found = self._next(crossing)
                if isinstance(found, Trouble):
                    raise found.error(crossing.number, crossing.subject)
                if found is not None:
                    yield found
        finally:
            self._waiting.discard(me)
            self._leave()

    def _next(self, crossing: Crossing) -> tuple[int, Tensor | None] | Trouble | None:
        """Wait for the next thing that ``crossing`` finds: the only place where a rank waits."""
        deadline = time.monotonic() + self._timeout_s
        while crossing.found.empty():
            self._era.check()
            self._check()
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._silent(crossing)
            turn_s = min(left, _LOOK_S)
            if not self._seat.acquire(blocking=False):
                with contextlib.suppress(Empty):
                    return crossing.found.get(timeout=turn_s)
                continue
            try:
                if crossing.found.empty():  # who had the seat may have found it meanwhile
                    self._step(turn_s)
            finally:
                self._seat.release()
        return crossing.found.get()

    def _step(self, timeout_s: float) -> bool:
        """Carry exchanges on, in the thread that holds the seat; see ``Office.step``.

        An exception, such as for lack of memory, leaves exchanges half done: it ends all of them.
        """
        self._check()
        try:
            return self._office.step(timeout_s)
        except Exception as error:
            self._failure = error
            self._office.fail(f"its exchanges failed with {type(error).__name__}: {error}")
            raise

    def _check(self) -> None:
        """Raise if an exception, perhaps in another thread, has ended all exchanges."""
        if self._failure is not None:
            raise ProtocolError(
                "an exception ended the exchanges of this rank with other hosts: "
                f"{type(self._failure).__name__}: {self._failure}. This process group cannot be "
                "used any more; make a new one, or start the job again"
            ) from self._failure

    def close(self, pid: int) -> None:
        """End when nobody needs this rank anymore; returns at once.

        ``pid`` is the process that carries exchanges on, and not a child that it forked.
        """
        if os.getpid() != pid:
            return
        with self._lock:
            self._is_closing = True
            if self._thread is not None or self._has_work():
                with contextlib.suppress(RuntimeError):  # the interpreter starts no more threads
                    self._call()
                    return
            self._office.close()

    def _silent(self, crossing: Crossing) -> LostRankError:
        ranks = sorted(crossing.near | crossing.places.keys() | crossing.passed)
        return LostRankError(
            f"rank {', '.join(map(str, ranks))} of the process group is there, but sent nothing "
            f"for {self._timeout_s:.0f} s, the group's time-out, while this rank waits for "
            f"collective {crossing.number}, a {crossing.subject}; it hangs, or does something else"
        )

    def _leave(self) -> None:
        """Call the thread if somebody has to carry on after us."""
        if self._has_work():
            with self._lock:
                self._call()

    def _has_work(self) -> bool:
        if self._failure is not None:
            return False
        if self._era.error is not None:  # what is in flight is of no use to anybody
            return False
        if self._is_closing:
            return not self._office.is_idle
        return bool(self._office.is_urgent or self._waiting)

    def _call(self) -> None:
        self._called.set()
        if self._thread is None:
            # Not a daemon thread: others may need what this process has still to send or to add up.
            thread = threading.Thread(target=self._run, name="fullshard-courier")
            thread.start()
            self._thread = thread  # set last, as start() may raise; the thread waits for our lock

    def _run(self) -> None:
        while True:
            is_called = self._is_called()
            if is_called:
                self._called.clear()
                self._carry_on()
            with self._lock:
                if self._called.is_set():
                    continue
                if self._is_closing:
                    self._office.close()
                if self._is_closing or not is_called:
                    self._thread = None
                    return

    def _is_called(self) -> bool:
        """Wait for a call; return whether there was one."""
        for _ in range(_LINGER_TURNS):
            if self._called.wait(timeout=_LINGER_S / _LINGER_TURNS):
                return True
            if not threading.main_thread().is_alive():
                return False
        return False

    def _carry_on(self) -> None:
        last = time.monotonic()
        while self._has_work():
            with self._seat:
                try:
                    has_moved = self._step(_TURN_S)
                except Exception:  # kept for the threads that wait for an exchange, or start one
                    return
            now = time.monotonic()
            last = now if has_moved else last
            is_leaving = self._is_closing or not threading.main_thread().is_alive()
            if is_leaving and now - last > _FAREWELL_S:
                return
