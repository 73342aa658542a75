"""Agreement of all ranks through the store of the default process group, without collectives.

Ranks that compute and ranks that write files may be at different places for a long time, and any
of them may fail or die. Here all ranks learn what the first one decided, and who failed why.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import os
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from fullshard import _torch, errors
from fullshard.errors import CheckpointError, FullshardError, LostRankError

PATIENCE = "FULLSHARD_PATIENCE_S"
"""Environment variable: seconds without a sign of life after which a rank counts as lost."""

_DEFAULT_PATIENCE_S = 30.0
_BEAT_S = 1.0
_POLL_S = 0.005
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


class Council:
    """A series of decisions that all ranks make together; every rank must make the same series.

    Args:
        what: what is being done, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.rank, self.world, self._store, self._number = _members()
        self._patience_s = float(os.environ.get(PATIENCE, _DEFAULT_PATIENCE_S))
        self._beats = self._decisions = 0
        self._last_beat = -math.inf

    def agree(
        self,
        own: Callable[[], Any],
        decide: Callable[[list[Any]], Any] | None = None,
        undo: Callable[[], Any] | None = None,
    ) -> Any:
        """Return, on all ranks, what the first rank decides.

        Args:
            own: gives what this rank contributes, in JSON's types.
            decide: gives the decision for the contributions of all ranks, in rank order, in JSON's
                types; called on the first rank. None: the decision is None.
            undo: called on the first rank before any rank raises.

        Raises:
            FullshardError: on all ranks, if any ``own`` or ``decide`` raised; of the class that
                they raised, if they are of fullshard and of one class, else a ``CheckpointError``.
            LostRankError: on all ranks that live, if a rank gives no sign of life.
        """
        failure = None
        try:
            said = {"value": own()}
        except Exception as error:
            failure, said = error, _described(error)
        with self._store_answers():
            verdict = self._verdict_on(said, decide, undo)
        if "error" in verdict:
            raise getattr(errors, verdict["kind"])(f"{self._what}: {verdict['error']}") from failure
        return verdict["value"]

    def share(self, text: str) -> str:
        """Hand ``text``, equal on many ranks, to the first rank; return a key to contribute."""
        key = hashlib.sha256(text.encode()).hexdigest()
        with self._store_answers():
            if not self._store.check([key]):
                packed = zlib.compress(text.encode(), 1)
                self._store.set(key, base64.b64encode(packed).decode())
        return key

    def take(self, key: str) -> str:
        """Return what was shared under ``key`` and forget it; on the first rank, in ``decide``."""
        text = zlib.decompress(base64.b64decode(self._store.get(key))).decode()
        self._store.delete_key(key)
        return text

    def beat(self) -> None:
        """Tell the other ranks, not more than once a second, that this one goes on."""
        now = time.monotonic()
        if now - self._last_beat > _BEAT_S:
            self._last_beat = now
            self._beats += 1
            self._store.set(f"beat/{self.rank}", str(self._beats))

    def _verdict_on(
        self,
        said: dict[str, Any],
        decide: Callable[[list[Any]], Any] | None,
        undo: Callable[[], Any] | None,
    ) -> dict[str, Any]:
        self._decisions += 1
        verdict_key = f"{self._number}/{self._decisions}"
        self._store.set(f"{verdict_key}/{self.rank}", json.dumps(said))
        if self.rank:
            self._wait_for({0: verdict_key})
            verdict = json.loads(self._store.get(verdict_key))
        else:
            keys = {rank: f"{verdict_key}/{rank}" for rank in range(self.world)}
            verdict = self._decided(keys, decide)
            if "error" in verdict and undo is not None:
                undo()
            self._store.set(verdict_key, json.dumps(verdict))
            # Only this rank read these, and all others have read the verdict before this one.
            for key in (*keys.values(), f"{self._number}/{self._decisions - 1}"):
                self._store.delete_key(key)
        return verdict  # type: ignore[no-any-return]

    def _decided(
        self, keys: Mapping[int, str], decide: Callable[[list[Any]], Any] | None
    ) -> dict[str, Any]:
        try:
            self._wait_for(keys)
            said = [json.loads(self._store.get(key)) for key in keys.values()]
            failed: dict[tuple[str, str], list[int]] = {}
            for rank, one in enumerate(said):
                if "error" in one:
                    failed.setdefault((one["error"], one["kind"]), []).append(rank)
            if failed:
                return _of_all(failed)
            return {"value": None if decide is None else decide([one["value"] for one in said])}
        except Exception as error:
            return _described(error)

    def _wait_for(self, keys: Mapping[int, str]) -> None:
        """Wait until all ``keys``, each to be set by a rank, are there."""
        missing = dict(keys)
        seen: dict[int, tuple[bytes, float]] = {}
        checked = 0.0
        while True:
            missing = {r: key for r, key in missing.items() if not self._store.check([key])}
            if not missing:
                return
            now = time.monotonic()
            if now - checked > _BEAT_S:
                checked = now
                self._look_for_life(list(missing), seen, now)
            self.beat()
            time.sleep(_POLL_S)

    def _look_for_life(
        self, ranks: Sequence[int], seen: dict[int, tuple[bytes, float]], now: float
    ) -> None:
        lost = []
        for rank in ranks:
            key = f"beat/{rank}"
            beats = self._store.get(key) if self._store.check([key]) else b""
            if rank not in seen or seen[rank][0] != beats:
                seen[rank] = (beats, now)
            elif now - seen[rank][1] > self._patience_s:
                lost.append(rank)
        if lost:
            raise LostRankError(
                f"rank(s) {', '.join(map(str, lost))} gave no sign of life for "
                f"{self._patience_s:g} s: their processes ended or hang. {PATIENCE} sets the limit"
            )

    @contextmanager
    def _store_answers(self) -> Iterator[None]:
        try:
            yield
        except FullshardError:
            raise
        except RuntimeError as error:  # torch's DistError
            raise LostRankError(
                f"{self._what}: the store of the process group does not answer ({error}); the "
                "process that keeps it, rank 0's in general, is gone"
            ) from error


def _of_all(failed: Mapping[tuple[str, str], list[int]]) -> dict[str, Any]:
    """Return the error of all ranks for the errors of some."""
    texts = [f"rank {_some(ranks)}: {text}" for (text, _), ranks in failed.items()]
    kinds = {kind for _, kind in failed}
    kind = kinds.pop() if len(kinds) == 1 else CheckpointError.__name__
    more = f"; and {len(texts) - 8} other errors" if len(texts) > 8 else ""
    return {"error": "; ".join(texts[:8]) + more, "kind": kind}


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


def _described(error: Exception) -> dict[str, Any]:
    if isinstance(error, FullshardError) and type(error).__name__ in errors.__all__:
        return {"error": str(error), "kind": type(error).__name__}
    kind = CheckpointError.__name__
    return {"error": f"{type(error).__name__}: {error}", "kind": kind}


def _members() -> tuple[int, int, dist.Store, int]:
    """Return this rank, the number of ranks, a store, and the number of this council."""
    if not dist.is_initialized():
        return 0, 1, dist.HashStore(), 0
    group = dist.group.WORLD
    assert group is not None
    number = next(_numbers.setdefault(group, itertools.count()))
    store = dist.PrefixStore("fullshard/council", _torch.default_store())
    return dist.get_rank(), dist.get_world_size(), store, number
