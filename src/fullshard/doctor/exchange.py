"""Exchange facts among the ranks of a job through its store, with or without a process group."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from fullshard.comm.heartbeat import clamped
from fullshard.comm.liveness import losing_ranks
from fullshard.comm.own_store import OwnStore
from fullshard.comm.store_round import Missing, StoreRound
from fullshard.comm.text import named_ranks
from fullshard.doctor.facts import Facts
from fullshard.errors import LostRankError


class KeyValueExchange:
    """Values of ranks, as JSON, by topic; each topic is used once."""

    def __init__(self, store: dist.Store, *, rank: int, world: int, timeout_s: float) -> None:
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        self._store = OwnStore(dist.PrefixStore("fullshard/doctor", store))

    def gather(self, topic: str, value: Any) -> list[Any]:
        """Return what all ranks gave, in rank order, on rank 0; an empty list on the others.

        Raises:
            LostRankError: some ranks gave nothing in time; the message names them.
        """
        now = StoreRound(self._store, topic)
        now.publish(self.rank, json.dumps(value))
        if self.rank:
            return []
        return self._read(now, range(self.world), self.timeout_s)

    def from_first(self, topic: str, value: Any = None) -> Any:
        """Return what rank 0 gave, on all ranks.

        Raises:
            LostRankError: rank 0 gave nothing in time, which is longer than rank 0 waits itself.
        """
        now = StoreRound(self._store, topic)
        if self.rank == 0:
            now.publish(0, json.dumps(value))
            return value
        return self._read(now, range(1), 3 * self.timeout_s)[0]

    def barrier(self, topic: str) -> None:
        """Wait until all ranks are here."""
        self.gather(topic, None)
        self.from_first(f"{topic}: all are here")

    def _read(self, now: StoreRound, ranks: range, timeout_s: float) -> list[Any]:
        until_s = time.monotonic() + timeout_s

        def look(missing: Missing) -> Collection[int]:
            if time.monotonic() > until_s:
                raise LostRankError(
                    f"{now.name}: nothing from {named_ranks(missing())} within {timeout_s:g} s"
                )
            return ()

        with losing_ranks(f"{now.name}: nothing from rank 0, which holds the store"):
            return [json.loads(text) for text in now.collect(ranks, look).values()]


def gather_facts(exchange: KeyValueExchange, own: Facts) -> list[Facts]:
    """Return the facts of all ranks on rank 0, an empty list on the others; compare their clocks.

    A rank reads its clock after rank 0 has said so and before rank 0 hears of it. A reading out of
    this interval proves a difference, however long the messages took.
    """
    ranks = [Facts.from_json(each) for each in exchange.gather("facts", asdict(own))]
    said_s = time.time()
    exchange.from_first("read your clock")
    clocks = exchange.gather("clock", time.time())
    heard_s = time.time()
    return [
        replace(one, clock_error_s=max(0.0, said_s - clock_s, clock_s - heard_s))
        for one, clock_s in zip(ranks, clocks, strict=True)
    ]


@contextmanager
def bounded(limit_s: float, what: str, *, then: Callable[[str], None]) -> Iterator[None]:
    """End this process, after calling ``then``, if the block takes longer than ``limit_s``.

    Calls into a backend may hang without ever coming back to Python, so no exception would help.
    """

    def end() -> None:
        try:
            then(f"{what}: not done within {limit_s:g} s")
        finally:
            os._exit(1)

    timer = threading.Timer(clamped(limit_s), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
