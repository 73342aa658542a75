"""Signs of life: a thread of each process tells the others, through the store, that it lives.

The store is the one that the default process group was made with.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from fullshard import _torch

PATIENCE = "FULLSHARD_PATIENCE_S"
"""Environment variable: seconds that a rank waits for others before it asks where they are."""

PULSE_S = 1.0
"""Seconds between two signs of life."""

_DEFAULT_PATIENCE_S = 5.0
_LEAST_STALL_S = 10.0
_SILENT = 6  # times the patience; threads may be held up, by a compiler or a large pickle


def patience_s() -> float:
    """Return how long a rank waits for others before it asks where they are, in seconds."""
    return float(os.environ.get(PATIENCE, _DEFAULT_PATIENCE_S))


def silence_s() -> float:
    """Return how long a process may give no sign of life before it counts as ended, in seconds."""
    return _SILENT * patience_s()


def stall_s() -> float:
    """Return how long a process that others talk to may keep them waiting, in seconds."""
    return max(_LEAST_STALL_S, 2 * silence_s())


class Sign(NamedTuple):
    """A sign of life."""

    host: str
    """Equal for processes that can see each other's numbers, those of one host in general."""
    pid: int
    number: int

    @property
    def is_of_the_dead(self) -> bool:
        """True if its process is of this host and has ended."""
        return self._state() in ("", "Z", "X")

    @property
    def is_of_the_stopped(self) -> bool:
        """True if its process is of this host and was stopped by a signal."""
        return self._state() in ("T", "t")

    def silence_s(self) -> float:
        """Return the seconds without a further sign after which this process counts as ended.

        A running process of this host may be silent while a call, such as a large pickle, holds
        its interpreter. Its limit is the time-out of the job's collectives.
        """
        group = dist.group.WORLD
        if group is None or self._state() in (None, "", "Z", "X", "T", "t"):
            return silence_s()
        kind = next(iter(_torch.device_types(group)))
        return max(silence_s(), _torch.timeout_of(group, kind).total_seconds())

    def _state(self) -> str | None:
        """Return the letter that Linux has for the process; "" if ended, None if not known."""
        if self.host != _own_host() or self.host == _UNKNOWN:
            return None
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return ""
        except OSError:  # such as for want of descriptors
            return None


def last_sign(store: dist.Store, rank: int) -> Sign | None:
    """Return the last sign of life of ``rank``; None if it gave none."""
    key = _key(rank)
    if not store.check([key]):
        return None
    host, pid, number = store.get(key).decode().split()
    return Sign(host, int(pid), int(number))


def begin_pulse() -> None:
    """Give signs of life from now on, until the default process group is destroyed."""
    group = dist.group.WORLD
    if group is not None and group not in _pulses:
        _pulses[group] = Pulse(_torch.own_store(), group.rank())
        weakref.finalize(group, _pulses[group].end)


class Pulse:
    """The thread of this process; gives signs of life of ``rank`` until its ``end``."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._key = _key(rank)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fullshard pulse", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        if threading.current_thread() is not self._thread:  # a finalizer may run in any
            self._thread.join(2 * PULSE_S)

    def _run(self) -> None:
        start = f"{_own_host()} {_own_number()}"
        for number in itertools.count():
            try:
                self._store.set(self._key, f"{start} {number}")
            except RuntimeError:  # the store is gone; who needs it, says so
                return
            if self._ended.wait(PULSE_S):
                return


_pulses: weakref.WeakKeyDictionary[dist.ProcessGroup, Pulse] = weakref.WeakKeyDictionary()


def _key(rank: int) -> str:
    return f"fullshard/pulse/{rank}"


@functools.cache  # /proc cannot be read where no descriptors are left
def _own_host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot + os.readlink("/proc/self/ns/pid") + os.readlink("/proc/self/ns/mnt")
    except OSError:  # not Linux
        return _UNKNOWN


_UNKNOWN = "?"
"""The host of processes whose numbers mean nothing to others."""


def _own_number() -> int:
    """Return the number of this process in /proc, which may be that of another namespace."""
    try:
        return int(os.readlink("/proc/self"))
    except OSError:
        return os.getpid()
