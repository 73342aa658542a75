"""Signs of life: a thread of each process tells the others, through the store, that it lives.

The store is the one that the default process group was made with.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import weakref
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from fullshard.comm.own_store import own_store

PATIENCE = "FULLSHARD_PATIENCE_S"
"""Environment variable: seconds that a rank waits for others before it asks where they are."""

PULSE_S = 1.0
"""Seconds between two signs of life."""

_DEFAULT_PATIENCE_S = 5.0
_LEAST_STALL_S = 10.0
_LONGEST_S = (2**31 - 1) // 1000  # they count milliseconds in 32 bits
_SILENT = 6  # times the patience; threads may be held up, by a compiler or a large pickle


def patience_s() -> float:
    """Return how long a rank waits for others before it asks where they are, in seconds."""
    return float(os.environ.get(PATIENCE, _DEFAULT_PATIENCE_S))


def silence_s() -> float:
    """Return how long a process may give no sign of life before it counts as ended, in seconds."""
    return _SILENT * patience_s()


def stall_s() -> float:
    """Return how long a process that others talk to may keep them waiting, in seconds."""
    return clamped(max(_LEAST_STALL_S, 2 * silence_s()))


def clamped(timeout_s: float) -> float:
    """Return ``timeout_s``, or the longest time-out that polls and sockets take, 24.8 days."""
    return min(timeout_s, _LONGEST_S)


class Sign(NamedTuple):
    """A sign of life."""

    host: str
    """Equal for processes that can see each other's numbers, those of one host in general."""
    pid: int
    """Number of the process in ``/proc``, which may be of an outer namespace."""
    began: str
    """Start of the process, by the host's clock: a later process may get its number."""
    number: int

    @property
    def is_of_the_dead(self) -> bool:
        """True if its process is of this host and has ended."""
        return self._state() in ("", "Z", "X")

    @property
    def is_of_the_stopped(self) -> bool:
        """True if its process is of this host and was stopped by a signal."""
        return self._state() in ("T", "t")

    @property
    def is_of_the_living(self) -> bool:
        """True if its process is of this host, lives, and was not stopped."""
        return self._state() not in (None, "", "Z", "X", "T", "t")

    def _state(self) -> str | None:
        """Return the letter that Linux has for the process; "" if ended, None if not known."""
        if self.host != _own_host():
            return None
        try:
            _, state, began = _process(str(self.pid))
        except (FileNotFoundError, ProcessLookupError):
            return ""
        except OSError:  # such as for lack of file descriptors
            return None
        return state if began == self.began else None


def last_sign(store: dist.Store, rank: int) -> Sign | None:
    """Return the last sign of life of ``rank``; None if it gave none."""
    key = _key(rank)
    if not store.check([key]):
        return None
    host, pid, began, number = store.get(key).decode().split()
    return Sign(host, int(pid), began, int(number))


def begin_pulse() -> None:
    """Give signs of life from now on, until the default process group is destroyed."""
    group = dist.group.WORLD
    if group is not None and group not in _pulses:
        _pulses[group] = Pulse(own_store(), group.rank())
        weakref.finalize(group, _pulses[group].end)


class Pulse:
    """The thread of this process; gives signs of life of ``rank`` until its ``end``."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._key = _key(rank)
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fullshard pulse", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread, which a child that this process forked does not have."""
        if os.getpid() != self._pid:
            return
        self._ended.set()
        if threading.current_thread() is not self._thread:  # a finalizer may run in any
            self._thread.join(2 * PULSE_S)

    def _run(self) -> None:
        start = _start()
        for number in itertools.count():
            with contextlib.suppress(RuntimeError):  # the store is out of reach, perhaps for good
                self._store.set(self._key, f"{start} {number}")
            if self._ended.wait(PULSE_S):
                return


_pulses: weakref.WeakKeyDictionary[dist.ProcessGroup, Pulse] = weakref.WeakKeyDictionary()


def _key(rank: int) -> str:
    return f"fullshard/pulse/{rank}"


def _start() -> str:
    """Return what all signs of this process begin with."""
    try:
        pid, _, began = _process("self")
        return f"{_own_host()} {pid} {began}"
    except OSError:  # no /proc: nothing is known of other processes
        return f"{secrets.token_hex(8)} 0 0"


def _process(name: str) -> tuple[str, str, str]:
    """Return number, state and start of a process of ``/proc``.

    ``os.getpid`` may be another number: a namespace may be without a ``/proc`` of its own.
    """
    pid, _, rest = Path(f"/proc/{name}/stat").read_text().partition(" ")
    fields = rest.rpartition(")")[2].split()
    return pid, fields[0], fields[19]


def _own_host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot + os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux: nothing is known of other processes
        return secrets.token_hex(8)
