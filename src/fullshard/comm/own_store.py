"""The store of the default process group, through a connection that reconnects when it breaks."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from fullshard._torch.world import default_store

log = logging.getLogger("fullshard")

_T = TypeVar("_T")
_PAUSE_S = 1.0
_CONNECT_S = 3.0


class OwnStore(dist.Store):
    """A store through a connection of its own, which reconnects when it breaks.

    An operation that a break interrupts is repeated, so ``add`` may count twice. While the store is
    out of reach, operations raise PyTorch's ``DistNetworkError``.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        super().set_timeout(store.timeout)  # type: ignore[attr-defined]
        self._store = _connected_anew(store)
        self._lock = threading.Lock()  # guards what follows, and is held while we connect
        self._broken = ""  # how the connection broke; empty while it holds
        self._next_s = 0.0  # time of the next attempt to connect, at the earliest
        self._warnings = {"lost and made anew", "lost"}  # each is given once
        self._waiters: list[OwnStore] = []  # idle connections for waits

    def set(self, key: str, value: str) -> None:
        """See PyTorch; returns once the store has the value."""

        def work(store: dist.Store) -> None:
            store.set(key, value)
            store.check([key])  # ``set`` gets no reply; ``check`` does

        self._done(work)

    def get(self, key: str) -> bytes:
        """See PyTorch; the key must be there."""
        return self._done(lambda store: store.get(key))

    def add(self, key: str, value: int) -> int:
        """See PyTorch."""
        return self._done(lambda store: store.add(key, value))

    def check(self, keys: list[str]) -> bool:
        """See PyTorch."""
        return self._done(lambda store: store.check(keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """See PyTorch; the keys must be there."""
        return self._done(lambda store: store.multi_get(keys))

    def has_extended_api(self) -> bool:
        """See PyTorch."""
        store: Any = self._store
        return bool(store.has_extended_api())

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]
        """See PyTorch; waits on another connection, so other threads are not held up."""
        self._on_waiter(lambda store: store.wait(keys, timeout))

    def get_within(self, key: str, timeout: timedelta) -> bytes:
        """Return the value of ``key`` as soon as it is there; waits like ``wait``."""

        def work(store: dist.Store) -> bytes:
            if isinstance(_innermost(store), dist.TCPStore):
                store.set_timeout(timeout)  # of this connection
            else:  # without connections, and perhaps the user's own
                store.wait([key], timeout)
            return store.get(key)

        return self._on_waiter(work)

    def _on_waiter(self, work: Callable[[dist.Store], _T]) -> _T:
        try:
            waiter = self._waiters.pop()
        except IndexError:
            waiter = self._waiter()
        try:
            return waiter._done(work)
        finally:
            self._waiters.append(waiter)

    def connect_to_wait(self) -> None:
        """Begin to connect for the first ``wait``, in a thread: name servers may be slow."""

        def connect() -> None:
            with contextlib.suppress(RuntimeError):  # the store may be gone again
                self._waiters.append(self._waiter())

        with contextlib.suppress(RuntimeError):  # the process may have no more threads
            threading.Thread(target=connect, name="fullshard store", daemon=True).start()

    def _waiter(self) -> OwnStore:
        waiter = OwnStore(self._connected())
        waiter._warnings = self._warnings
        return waiter

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """See PyTorch."""
        return self._done(lambda store: store.compare_set(key, expected_value, desired_value))

    def delete_key(self, key: str) -> bool:
        """See PyTorch."""
        return self._done(lambda store: store.delete_key(key))

    def set_timeout(self, timeout: timedelta) -> None:
        """See PyTorch."""
        super().set_timeout(timeout)
        self._store.set_timeout(timeout)

    def _done(self, work: Callable[[dist.Store], _T]) -> _T:
        while True:
            store = self._connected()
            try:
                return work(store)
            except dist.DistNetworkError as error:
                with self._lock:
                    if store is self._store:
                        self._broken = str(error).partition("\n")[0]

    def _connected(self) -> dist.Store:
        """Return the store; connect anew first if the connection is broken.

        Raises:
            DistNetworkError: the store is out of reach.
        """
        with self._lock:
            if self._broken:
                if time.monotonic() < self._next_s:
                    raise dist.DistNetworkError(self._broken)
                try:
                    self._connect()
                finally:
                    self._next_s = time.monotonic() + _PAUSE_S
            return self._store

    def _connect(self) -> None:
        store: Any = _innermost(self._store)
        try:  # PyTorch itself would try for as long as the time-out, and log each attempt
            socket.create_connection((store.host, store.port), _CONNECT_S).close()
        except ConnectionRefusedError as error:  # its process has ended, as at the end of a job
            raise dist.DistNetworkError(self._broken) from error
        except OSError as error:
            self._warn("lost", f"the store does not answer: {error}")
            raise dist.DistNetworkError(self._broken) from error
        self._store.set_timeout(timedelta(seconds=_CONNECT_S))
        self._store = self._store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(self.timeout)  # type: ignore[attr-defined]
        self._warn("lost and made anew", self._broken)
        self._broken = ""

    def _warn(self, what: str, why: str) -> None:
        if what in self._warnings:
            self._warnings.remove(what)
            log.warning(
                "the connection to the store of the process group, through which ranks watch each "
                "other, was %s (%s)", what, why,
            )  # fmt: skip


def _innermost(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _connected_anew(store: dist.Store) -> dist.Store:
    try:
        own: dist.Store = store.clone()  # type: ignore[attr-defined]
        return own
    except RuntimeError:  # stores without connections do not need it
        return store


_own_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, OwnStore] = weakref.WeakKeyDictionary()


def own_store() -> OwnStore:
    """Return the default store through connections of our own, the same object at each call.

    All threads share one connection, one call at a time. It is not the connection of the default
    store, because user code may block in a wait on that. Each wait that runs at the same time as
    others has one more connection. Connecting takes long where PyTorch waits for a name server.
    """
    group = dist.group.WORLD
    assert group is not None
    own = _own_stores.get(group)
    if own is None:
        own = _own_stores[group] = OwnStore(default_store())
        own.connect_to_wait()
    return own
