"""Requests to the store for a save and for a diagnosis, by each of many ranks.

Ranks are threads, each with connections of its own to one real ``TCPStore``. A save is the two
decisions and the two shared texts of ``checkpoint.saving`` in one file system, without files; one
on several machines makes three more. A diagnosis is one poll round of the watch. Every operation of
``OwnStore`` counts as one request, blocking ones too.
"""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from bench.compare import verdict
from bench.machine import grid
from fullshard.comm import consensus, own_store, store_round
from fullshard.comm.consensus import Consensus
from fullshard.comm.own_store import OwnStore
from fullshard.watch import rounds
from fullshard.watch.rounds import Rounds
from fullshard.watch.status import GroupStatus, Issued, StatusReport

WORLDS = (8, 64, 1024)
LATE_S = 2.0
BOUND = 20
"""Requests that a rank may make for a save or a diagnosis, but for the one that collects."""


class _Counting(OwnStore):
    """A connection that counts its requests for the rank of the thread that made it."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__(store)
        self._rank = _here.rank

    def _done(self, work: Any) -> Any:
        _asked[self._rank] += 1
        return super()._done(work)


_asked: Counter[int] = Counter()


class _Here(threading.local):
    rank = -1
    store: OwnStore
    members: Any


_here = _Here()


def save(decisions: int, late_s: float = 0.0) -> None:
    """Make the two decisions of a save, then the further ones of several machines."""
    if _here.rank == 1:
        time.sleep(late_s)
    one = Consensus("save", "save", "a checkpoint")
    key = one.share(json.dumps(["a list of tensors"] * 10))
    digests = one.share(json.dumps(["digests of tensors"] * 10))
    one.agree(lambda: key, lambda keys: one.take(keys[0]))
    one.agree(lambda: digests, lambda keys: one.take(keys[0]))
    for _ in range(decisions - 2):
        one.agree(lambda: [_here.rank, "written"], len)


def diagnosis(world: int) -> Callable[[], None]:
    """Return what a rank does in a diagnosis in which rank 1 of ``world`` is late."""

    def run() -> None:
        rank = _here.rank
        late = rank == 1
        issued = () if late else (Issued(0, "gather", "blocks.0", 8),)
        waits = None if late else 0
        group = GroupStatus("0", tuple(range(world)), len(issued), issued, waits, 600.0)
        mine = Rounds(rank, world)
        _asked[rank] = 0
        mine.report(1, StatusReport(rank, (group,), True, "", 0.0, ""))
        text = mine.verdict(1).text
        assert "rank 1" in text, text

    return run


@contextmanager
def ranks(world: int) -> Iterator[Callable[[Callable[[], None]], dict[str, float]]]:
    """Run ``world`` threads as ranks of one store; yield a function that calls one on all."""
    server = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=120))
    barrier, began_s = threading.Barrier(world), list[float]()

    def start(rank: int, run: Callable[[], None]) -> None:
        _here.rank = rank
        _here.store = _Counting(server)
        _here.store._waiters.append(_here.store._waiter())
        _asked[rank] = 0
        _here.members = members = consensus._Members(None, "save")
        members.rank, members.world, members.store = rank, world, _here.store
        members.numbers = iter(["bench/0"])
        barrier.wait()
        if not rank:
            began_s.append(time.monotonic())
        run()
        barrier.wait()  # every rank keeps its connection until all are done

    def on_all(run: Callable[[], None]) -> dict[str, float]:
        _asked.clear()
        with ThreadPoolExecutor(world) as threads:
            list(threads.map(lambda rank: start(rank, run), range(world)))
        asked = sorted(_asked[rank] for rank in range(world))
        return {
            "requests of the rank that collects": asked[-1],
            "of any other rank": asked[-2],
            "of a rank in the mean": sum(asked) / world,
            "seconds": time.monotonic() - began_s.pop(),
        }

    with (
        patch.object(own_store, "OwnStore", _Counting),
        patch.object(consensus, "_members", lambda _: _here.members),
        patch.object(rounds, "own_store", lambda: _here.store),
        # A thousand threads share one interpreter: real ranks look around and beat by themselves.
        patch.object(store_round, "_LOOK_S", 2.0),
        patch.object(rounds, "ANSWER_S", 60.0),
        patch.dict(os.environ, FULLSHARD_PATIENCE_S="60"),
    ):
        yield on_all


@contextmanager
def many_threads() -> Iterator[None]:
    """Allow a thousand threads with a connection each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(1 << 20)
    try:
        yield
    finally:
        threading.stack_size(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def figures() -> dict[str, dict[str, float]]:
    """Return requests and seconds, by operation and world size, all ranks on this machine."""
    found = {}
    with many_threads():
        for world in WORLDS:
            with ranks(world) as on_all:
                found[f"save, {world} ranks"] = on_all(partial(save, 2))
            with ranks(world) as on_all:
                found[f"save, one rank {LATE_S:g} s late, {world} ranks"] = on_all(
                    partial(save, 2, LATE_S)
                )
            with ranks(world) as on_all:
                found[f"save on machines, {world} ranks"] = on_all(partial(save, 5))
            with ranks(world) as on_all:
                found[f"diagnosis, {world} ranks"] = on_all(diagnosis(world))
    return found


def report(found: dict[str, dict[str, float]]) -> int:
    """Print the table; return how many operations exceed ``BOUND``."""
    print(grid("", found, digits=1))
    missed = [where for where, one in found.items() if one["of any other rank"] > BOUND]
    return verdict(missed, f"more than {BOUND} of a rank")
