"""Heartbeats: a thread of each process writes to the store that the process is alive.

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
"""Environment variable: seconds that a rank waits for others before it starts a poll round."""

BEAT_S = 1.0
"""Seconds between two heartbeats of a process."""

_DEFAULT_PATIENCE_S = 5.0
_LEAST_STALL_S = 10.0
_LONGEST_S = (2**31 - 1) // 1000  # polls and sockets count milliseconds in 32 bits
_SILENT = 6  # times the patience; threads may be held up, by a compiler or a large pickle


def patience_s() -> float:
    """Return how many seconds a rank waits for others before it starts a poll round."""
    return float(os.environ.get(PATIENCE, _DEFAULT_PATIENCE_S))


def silence_s() -> float:
    """Return after how many silent seconds a rank is lost, if its process is not seen to run."""
    return _SILENT * patience_s()


def stall_s() -> float:
    """Return how many seconds a process may keep a peer waiting on a connection."""
    return clamped(max(_LEAST_STALL_S, 2 * silence_s()))


def clamped(timeout_s: float) -> float:
    """Return ``timeout_s``, or the longest time-out that polls and sockets take, 24.8 days."""
    return min(timeout_s, _LONGEST_S)


class Beat(NamedTuple):
    """The last heartbeat of a process."""

    host: str
    """Equal for processes that see each other's process numbers: in general, those of one host."""
    pid: int
    """Number of the process in ``/proc``, which may belong to an outer namespace."""
    began: str
    """Start of the process by the host's clock, because a later process may get its number."""
    number: int

    @property
    def has_ended(self) -> bool:
        """True if the process ran on this host and has ended."""
        return self._state() in ("", "Z", "X")

    @property
    def is_stopped(self) -> bool:
        """True if the process is on this host and was stopped by a signal."""
        return self._state() in ("T", "t")

    @property
    def is_running(self) -> bool:
        """True if the process is on this host, is alive, and was not stopped."""
        return self._state() not in (None, "", "Z", "X", "T", "t")

    def _state(self) -> str | None:
        """Return Linux's letter for the state of the process: "" if it ended, else None."""
        if self.host != _own_host():
            return None
        try:
            _, state, began = _process(str(self.pid))
        except (FileNotFoundError, ProcessLookupError):
            return ""
        except OSError:  # such as for lack of file descriptors
            return None
        return state if began == self.began else None


def last_beat(store: dist.Store, rank: int) -> Beat | None:
    """Return the last heartbeat of ``rank``; None if there was none."""
    key = _key(rank)
    if not store.check([key]):
        return None
    host, pid, began, number = store.get(key).decode().split()
    return Beat(host, int(pid), began, int(number))


def start_heartbeat() -> None:
    """Start the heartbeat of this process, which ends with the default process group."""
    group = dist.group.WORLD
    if group is not None and group not in _heartbeats:
        _heartbeats[group] = Heartbeat(own_store(), group.rank())
        weakref.finalize(group, _heartbeats[group].end)


class Heartbeat:
    """The thread that writes the heartbeats of ``rank`` until ``end``."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._key = _key(rank)
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fullshard heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread; do nothing in a forked child, which has no such thread."""
        if os.getpid() != self._pid:
            return
        self._ended.set()
        if threading.current_thread() is not self._thread:  # finalizers may run in any thread
            self._thread.join(2 * BEAT_S)

    def _run(self) -> None:
        start = _start()
        for number in itertools.count():
            with contextlib.suppress(RuntimeError):  # the store is out of reach
                self._store.set(self._key, f"{start} {number}")
            if self._ended.wait(BEAT_S):
                return


_heartbeats: weakref.WeakKeyDictionary[dist.ProcessGroup, Heartbeat] = weakref.WeakKeyDictionary()


def _key(rank: int) -> str:
    return f"fullshard/heartbeat/{rank}"


def _start() -> str:
    """Return the text that every heartbeat of this process begins with."""
    try:
        pid, _, began = _process("self")
        return f"{_own_host()} {pid} {began}"
    except OSError:  # no /proc: the states of other processes are unknown
        return f"{secrets.token_hex(8)} 0 0"


def _process(name: str) -> tuple[str, str, str]:
    """Return number, state and start of a process of ``/proc``.

    ``os.getpid`` may differ from this number: a PID namespace may lack a ``/proc`` of its own.
    """
    # The name in it may be cut inside a letter.
    text = Path(f"/proc/{name}/stat").read_text(errors="replace")
    pid, _, rest = text.partition(" ")
    fields = rest.rpartition(")")[2].split()
    return pid, fields[0], fields[19]


def _own_host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot + os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux: the states of other processes are unknown
        return secrets.token_hex(8)
