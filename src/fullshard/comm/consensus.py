"""Decisions of all ranks through the store of the default process group, without collectives.

Ranks that compute and ranks that write files may be at different places for a long time, and any
of them may fail or die. A consensus lets all ranks learn what the first rank decided, or which rank
failed and why.

Every process has a heartbeat from its first consensus on. A rank whose process ends is named at
once if it runs on this host, else after six to seven times ``FULLSHARD_PATIENCE_S``. A live process
on this host is waited for up to the time-out, even without a heartbeat. Decisions are recorded in a
ledger of issued operations. So if two ranks wait for each other, one in a consensus and one in a
training step for example, the watch sees it and ends both waits. Without a watch, a live rank that
does not come is named after the time-out of the store, which is that of ``init_process_group``.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fullshard import errors
from fullshard.comm.blocking import drawn_name
from fullshard.comm.heartbeat import BEAT_S, PATIENCE, silence_s, start_heartbeat
from fullshard.comm.ledger import Ledger, ledger_beside
from fullshard.comm.liveness import DEAD, Liveness, losing_ranks
from fullshard.comm.own_store import own_store
from fullshard.comm.protocol import Done
from fullshard.comm.store_round import Look, Missing, StoreRound
from fullshard.comm.text import named_ranks
from fullshard.errors import (
    CheckpointError,
    FailedRankError,
    FullshardError,
    LostRankError,
    StorageError,
)


class Consensus:
    """A series of decisions that all ranks make together; every rank must make the same series.

    Args:
        what: the operation, for messages.
        kind: the operation as one of ``ledger.BETWEEN_STEPS``, equal on all ranks.
        label: the object of the operation, such as "a checkpoint", equal on all ranks.

    Raises:
        PeerError: another rank failed, so no decision can be made.
    """

    def __init__(self, what: str, kind: str, label: str) -> None:
        self._what = what
        members = _members(kind)
        self.rank, self.world = members.rank, members.world
        self._store, self._numbers = members.store, members.numbers
        self._ledger, self._kind, self._label = members.ledger, kind, label
        self._thread_id = threading.get_ident()
        self._liveness = Liveness(self._store)
        self._decisions = 0
        self._last: StoreRound | None = None
        self._enter()

    def _enter(self) -> None:
        """Take the next number, and record the consensus in the ledger."""
        self._number = next(self._numbers)
        if self._ledger is not None:
            self._ledger.issue(self._kind, self._label, 0, Done)
            self._entry, self._era = self._ledger.entries[-1], self._ledger.era

    def agree(
        self,
        own: Callable[[], Any],
        decide: Callable[[list[Any]], Any] | None = None,
        undo: Callable[[], Any] | None = None,
    ) -> Any:
        """Return, on all ranks, what the first rank decides.

        Args:
            own: returns the contribution of this rank, of types that JSON has.
            decide: called on the first rank with the contributions of all ranks, in rank order;
                returns the decision, of types that JSON has. None: the decision is None.
            undo: called on the first rank before any rank raises.

        Raises:
            FullshardError: on all ranks, if any ``own`` or ``decide`` raised. If all of them raised
                one class of fullshard's errors, of that class; ``CheckpointError`` for an
                ``OSError``; else ``FailedRankError``.
            LostRankError: on all live ranks, if a rank ended or hangs.
        """
        failure = None
        try:
            said = {"value": own()}
        except Exception as error:
            failure, said = error, _described(error)
        with self._store_answers():
            verdict = self._verdict_on(said, decide, undo)
        if "error" in verdict:
            self._check()
            raise getattr(errors, verdict["kind"])(f"{self._what}: {verdict['error']}") from failure
        return verdict["value"]

    def share(self, text: str) -> str:
        """Publish ``text``, once if it is equal on many ranks; return its key, to contribute."""
        key = f"{self._number}/{hashlib.sha256(text.encode()).hexdigest()}"
        shared = StoreRound(self._store, key)
        with self._store_answers():
            if not shared.is_decided:
                shared.decide_once(base64.b64encode(zlib.compress(text.encode(), 1)).decode())
        return key

    def take(self, key: str) -> str:
        """Return and delete the text shared under ``key``; on the first rank, in ``decide``."""
        shared = StoreRound(self._store, key)
        text = zlib.decompress(base64.b64decode(shared.decision(lambda: None))).decode()
        shared.forget(decision=True)
        return text

    def _round(self, number: int) -> StoreRound:
        return StoreRound(self._store, f"{self._number}/{number}")

    def _verdict_on(
        self,
        said: dict[str, Any],
        decide: Callable[[list[Any]], Any] | None,
        undo: Callable[[], Any] | None,
    ) -> dict[str, Any]:
        self._decisions += 1
        if self.rank and self._decisions == 1:
            while self._round(1).is_decided:  # without this rank
                self._enter()
        now = self._round(self._decisions)
        now.publish(self.rank, json.dumps(said))
        if self.rank:
            try:
                with self._waiting() as look:
                    text = now.decision(lambda: look(lambda: self._undecided(now)))
            except LostRankError as error:
                return _described(error)
            return json.loads(text)  # type: ignore[no-any-return]
        verdict = self._decided(now, decide)
        if "error" in verdict and undo is not None:
            undo()
        now.decide_once(json.dumps(verdict))
        now.forget(range(self.world))  # only this rank reads these texts
        self._last = now
        return verdict

    def _decided(
        self, now: StoreRound, decide: Callable[[list[Any]], Any] | None
    ) -> dict[str, Any]:
        try:
            with self._waiting() as look:
                found = now.collect(range(self.world), look)
            if self._last is not None:  # all ranks have read it, as they took part in this one
                self._last.forget(decision=True)
            said = [json.loads(found[rank]) for rank in range(self.world)]
            failed: dict[tuple[str, str], list[int]] = {}
            for rank, one in enumerate(said):
                if "error" in one:
                    failed.setdefault((one["error"], one["kind"]), []).append(rank)
            if failed:
                return _of_all(failed)
            return {"value": None if decide is None else decide([one["value"] for one in said])}
        except Exception as error:
            return _described(error)

    def _undecided(self, now: StoreRound) -> list[int]:
        """Return the first rank, unless it has decided."""
        return [] if now.is_decided else [0]

    @property
    def _watched(self) -> Ledger | None:
        """The ledger; None in a background save, which training faults do not end."""
        return self._ledger if threading.get_ident() == self._thread_id else None

    def _check(self) -> None:
        """Raise the error of a fault that keeps other ranks from this decision."""
        if self._watched is not None:
            self._era.check()

    @contextmanager
    def _waiting(self) -> Iterator[Look]:
        """Show that this rank waits in the block; yield a ``Look`` that finds lost ranks."""
        ledger = self._watched
        with nullcontext() if ledger is None else ledger.awaiting(self._entry):
            # The others wait for the first rank, which waits for all of them before: twice as long.
            limit_s = self.limit_s * (2 if self.rank else 1)
            began_s = looked_s = time.monotonic()

            def look(missing: Missing) -> Collection[int]:
                nonlocal looked_s
                self._check()
                now_s = time.monotonic()
                if now_s - looked_s > BEAT_S:
                    looked_s = now_s
                    self._look_for_life(missing)
                if now_s - began_s > limit_s:
                    raise LostRankError(
                        f"{named_ranks(late := missing())} {'is' if len(late) == 1 else 'are'} "
                        f"alive but did not take part within {limit_s:g} s: the process hangs or "
                        "runs other code"
                    )
                return ()

            yield look

    @property
    def limit_s(self) -> float:
        """Seconds to wait for live ranks."""
        timeout: timedelta = self._store.timeout  # type: ignore[attr-defined]
        return timeout.total_seconds()

    def _look_for_life(self, missing: Missing) -> None:
        lost = self._liveness.lost([0] if self.rank else missing())
        if lost:  # a rank may have ended after its part
            still = missing()
            lost = {rank: why for rank, why in lost.items() if rank in still}
        for rank, why in lost.items():
            if why == DEAD:
                error, ledger = LostRankError(f"the process of rank {rank} ended"), self._watched
                # The fault that the watch finds, if any.
                raise error if ledger is None else ledger.explained(error, self._entry)
        if lost:
            raise LostRankError(
                f"{named_ranks(list(lost))} had no heartbeat for {silence_s():g} s (6 times "
                f"{PATIENCE}): the process ended, was stopped, or cannot reach the store"
            )

    def _store_answers(self) -> AbstractContextManager[None]:
        return losing_ranks(
            f"{self._what}: the store of the process group does not answer; the process that "
            "keeps it, usually that of rank 0, has ended or is out of reach"
        )


def _of_all(failed: Mapping[tuple[str, str], list[int]]) -> dict[str, Any]:
    """Join the errors of some ranks into the one error that all ranks raise."""
    texts = [f"{named_ranks(ranks)}: {text}" for (text, _), ranks in failed.items()]
    kinds = {kind for _, kind in failed}
    if kinds == {CheckpointError.__name__, StorageError.__name__}:
        kinds = {StorageError.__name__}
    kind = kinds.pop() if len(kinds) == 1 else FailedRankError.__name__
    more = f"; and {len(texts) - 8} other errors" if len(texts) > 8 else ""
    return {"error": "; ".join(texts[:8]) + more, "kind": kind}


def _described(error: Exception) -> dict[str, Any]:
    if isinstance(error, FullshardError) and type(error).__name__ in errors.__all__:
        return {"error": str(error), "kind": type(error).__name__}
    kind = CheckpointError if isinstance(error, OSError) else FailedRankError
    return {"error": f"{type(error).__name__}: {error}", "kind": kind.__name__}


class _Members:
    """The state that all ``Consensus`` objects of a job share; ``group`` is None without peers."""

    def __init__(self, group: dist.ProcessGroup | None, kind: str) -> None:
        self.rank, self.world = (0, 1) if group is None else (group.rank(), group.size())
        self.ledger: Ledger | None = None
        self.store: dist.Store = dist.HashStore()
        self.numbers: Iterator[str] = map(str, itertools.count())
        """Prefixes of the keys of the decisions."""
        if group is None:
            return
        # Ranks may have used this store before, in another process group: take new keys.
        start = f"fullshard/{drawn_name(f'the key prefix of decisions, for a {kind}')}"
        self.numbers = (f"{start}/{number}" for number in itertools.count())
        self.store = own_store()
        self.ledger = ledger_beside(self, "decisions")
        start_heartbeat()


_members_of: weakref.WeakKeyDictionary[dist.ProcessGroup, _Members] = weakref.WeakKeyDictionary()


def _members(kind: str) -> _Members:
    """Return the state; the first call on a group is a collective, for an operation ``kind``."""
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        return _Members(None, kind)
    if group not in _members_of:
        _members_of[group] = _Members(group, kind)
    return _members_of[group]
