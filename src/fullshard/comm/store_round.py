"""One round of ranks through a store: each publishes a text, and one decision is made for all.

A rank that waits blocks in the store; it does not ask again and again. The first decision that
reaches the store counts for all ranks. A rank that proposes another decision later gets the first.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from fullshard.comm.own_store import OwnStore

Missing = Callable[[], list[int]]
"""Asks the store which ranks have not published yet."""

Look = Callable[[Missing], Collection[int]]
"""Returns the ranks to give up waiting for, or raises."""

_LOOK_S = 0.05
"""Seconds between two calls of a ``Look``."""
_BLOCK_S = 60.0
"""Seconds that one request may block; PyTorch logs each time-out."""
_PIECE_NBYTES = 4 << 20
"""Bytes of one message: stores refuse more than 8 MiB."""


class StoreRound:
    """One round; its keys in the store begin with ``name``, which no other round may use."""

    def __init__(self, store: dist.Store, name: str) -> None:
        self._store = store
        self.name = name
        self._pieces_of: dict[str, list[str]] = {}  # keys of long texts that were read or written

    def publish(self, rank: int, text: str) -> None:
        """Publish the text of ``rank``, once."""
        self._put(self._key(rank), text)

    def published(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the texts in the store, by rank; two requests if all are there and short."""
        return self._texts(self._present(ranks))

    def _present(self, ranks: Sequence[int]) -> list[int]:
        keys = set(present(self._store, list(map(self._key, ranks))))
        return [rank for rank in ranks if self._key(rank) in keys]

    def collect(self, ranks: Iterable[int], look: Look) -> dict[int, str]:
        """Wait for the texts of ``ranks``; return them by rank, without ranks that were given up.

        Args:
            ranks: the ranks to wait for.
            look: called from time to time while any is missing.
        """
        awaited = list(ranks)

        def missing() -> list[int]:
            found = set(self._present(awaited))
            return [rank for rank in awaited if rank not in found]

        while True:
            given_up: set[int] = set()
            with _Blocked(self._store, list(map(self._key, awaited))) as blocked:
                while not (given_up or blocked.ends_within(_LOOK_S)):
                    given_up = {*look(missing)}.intersection(awaited)
            if not given_up:
                return self._texts(awaited)
            awaited = [rank for rank in awaited if rank not in given_up]

    @property
    def is_decided(self) -> bool:
        """True if the decision is in the store."""
        return self._store.check([self._decision_key])

    def decide_once(self, text: str) -> str:
        """Make ``text`` the decision, unless there is one; return the decision."""
        return self._put(self._decision_key, text)

    def decision(self, look: Callable[[], object]) -> str:
        """Wait for the decision and return it; ``look``, called from time to time, may raise."""
        key = self._decision_key
        with _Blocked(self._store, [key], partial(_get_within, self._store, key)) as blocked:
            while not blocked.ends_within(_LOOK_S):
                look()
        head = self._store.get(key) if blocked.value is None else blocked.value
        return self._joined(key, head.decode())

    def forget(self, ranks: Iterable[int] = (), *, decision: bool = False) -> None:
        """Delete the texts of ``ranks``, and the decision if asked for.

        Further pieces of a long text are deleted if this object has read or written it.
        """
        for key in [*map(self._key, ranks), *[self._decision_key] * decision]:
            for stored in (*self._pieces_of.pop(key, ()), key):
                self._store.delete_key(stored)

    @property
    def _decision_key(self) -> str:
        return f"{self.name}/decision"

    def _key(self, rank: int) -> str:
        return f"{self.name}/{rank}"

    def _texts(self, ranks: Sequence[int]) -> dict[int, str]:
        keys = list(map(self._key, ranks))
        heads = zip(keys, multi_get(self._store, keys), strict=True)
        return dict(zip(ranks, (self._joined(key, head) for key, head in heads), strict=True))

    def _put(self, key: str, text: str) -> str:
        """Set ``key`` unless it is there; return its text. A long text goes in pieces."""
        parts = [text[at : at + _PIECE_NBYTES] for at in range(0, len(text), _PIECE_NBYTES)]
        pieces = f"{key}/{secrets.token_hex(4)}" if len(parts) > 1 else ""
        head = f"{len(parts[1:])},{pieces}\n{parts[0] if parts else ''}"
        for piece, part in zip(_pieces(head), parts[1:], strict=True):
            self._store.set(piece, part)
        found = self._store.compare_set(key, "", head).decode()
        if found != head:
            return self._joined(key, found)
        self._pieces_of[key] = _pieces(head)
        return text

    def _joined(self, key: str, head: str) -> str:
        """Return the text at ``key``, whose value is ``head``, with all its pieces."""
        self._pieces_of[key] = pieces = _pieces(head)
        return "".join([head.partition("\n")[2], *multi_get(self._store, pieces)])


def _pieces(head: str) -> list[str]:
    """Return the keys of all pieces but the first, which is in ``head`` itself."""
    count, _, name = head.partition("\n")[0].partition(",")
    return [f"{name} {number}" for number in range(int(count))]


def present(store: Any, keys: Sequence[str]) -> list[str]:
    """Return the keys that are in the store; few requests if only few are missing."""
    if not keys or store.check(list(keys)):
        return list(keys)
    if len(keys) == 1:
        return []
    size = -(-len(keys) // 8)
    parts = (keys[at : at + size] for at in range(0, len(keys), size))
    return [key for part in parts for key in present(store, part)]


def multi_get(store: Any, keys: list[str]) -> list[str]:
    """Return the values of existing ``keys``, in one request if the store supports that."""
    if not keys:
        return []
    is_one = store.has_extended_api()
    found = store.multi_get(keys) if is_one else [store.get(key) for key in keys]
    return [value.decode() for value in found]


def _get_within(store: dist.Store, key: str, timeout: timedelta) -> bytes:
    if isinstance(store, OwnStore):
        return store.get_within(key, timeout)
    store.wait([key], timeout)
    return store.get(key)


class _Blocked:
    """A request that blocks until all keys are there, in a thread, so its caller can give up."""

    def __init__(
        self,
        store: dist.Store,
        keys: list[str],
        request: Callable[[timedelta], bytes | None] | None = None,
    ) -> None:
        """``request``: blocks until then, or for a time; None: a plain wait."""
        self._store = store
        self._keys = keys
        self._request = request or partial(store.wait, keys)
        self.value: bytes | None = None  # what the request returned
        self._error: Exception | None = None
        self._is_given_up = False
        self._ended = threading.Event()
        self._asks = False  # again and again, without a thread

    def __enter__(self) -> _Blocked:
        if not self._keys:
            self._ended.set()
            return self
        thread = threading.Thread(target=self._wait, name="fullshard round", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process may have no more threads
            self._asks = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_given_up = True  # the request itself ends later

    def ends_within(self, timeout_s: float) -> bool:
        """Return whether all keys are there, at the latest after ``timeout_s``."""
        if self._asks and self._store.check(self._keys):
            return True
        ended = self._ended.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return ended

    def _wait(self) -> None:
        try:
            while not self._is_given_up:
                with contextlib.suppress(dist.DistStoreError):  # such as at the end of its time
                    self.value = self._request(timedelta(seconds=_BLOCK_S))
                    break
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()
