"""One pool of gloo processes for the whole test session.

    @on_ranks(2, 3)
    def test_gather(world):        # at module level; runs on each rank, torch.distributed is ready
        assert gather_ranks() == list(range(world))

    def test_gather_to_one(pool):
        assert pool.run(2, gather_to_one) == [[0, 1], None]    # every rank's result, in rank order

Starting a process and importing torch takes seconds, a job on a running process a millisecond.
Functions travel by name, arguments and results by value: plain pickle
copies tensors, where multiprocessing's own would pass file descriptors to shared memory.

A rank that raises fails the test with its traceback. A rank that hangs or dies fails it with its
Python stack; then every process of the pool is killed, and the next job starts new ones.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import Parameter, Signature, signature
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.lanes.checked import checked
from tests.ranks import worker

MAX_WORLD = 8
START_TIMEOUT_S = 120.0
SETTLE_TIMEOUT_S = 10.0
GRACE_S = 2.0  # how long the others may take to answer once one rank has failed

every_world = pytest.mark.parametrize("world", [2, 3, 4])


def on_ranks(*worlds: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the body of a test on every rank, in each of these worlds; options as run has them.

    The test stands at the top of a module and takes fixtures and parameters as any other does. If
    there are several worlds, it takes ``world`` too. The process group is ready.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        names = list(signature(body).parameters)

        @wraps(body)
        def test(pool: RankPool, **given: Any) -> None:
            __tracebackhide__ = True
            world = given.get("world", worlds[0])
            pool.run(world, body, *[given[name] for name in names], **options)

        body.__qualname__ += ".__wrapped__"  # ranks import the body by this name
        several = ["world"] if len(worlds) > 1 else []
        wanted = dict.fromkeys(["pool", *several, *names])
        test.__signature__ = Signature(  # type: ignore[attr-defined]
            [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in wanted]
        )
        return pytest.mark.parametrize("world", worlds)(test) if several else test

    return decorate


class RankError(Exception):
    """A job failed; the message holds what each failing rank said and where each stuck one is."""


@dataclass
class Rank:
    """One process of the pool, seen from the test session."""

    number: int
    process: BaseProcess
    pipe: Connection
    stack_path: Path

    def stack(self, timeout_s: float = 2.0) -> str:
        """This process's Python stacks, written by its signal handler even inside a C++ wait."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, worker.STACK_SIGNAL)
        deadline = time.monotonic() + timeout_s
        text = ""
        while time.monotonic() < deadline:
            time.sleep(0.05)
            before, text = text, self.stack_path.read_text(errors="replace")
            if text and text == before:
                break
        threads = [thread for thread in text.split("\n\n") if worker.WATCHER not in thread]
        return "\n\n".join(threads) or "(no stack)"

    def kill(self) -> None:
        """End this process, whatever it is doing."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


@dataclass
class Outcome:
    """What the ranks of one job answered."""

    replies: dict[int, worker.Reply] = field(default_factory=dict)
    problems: list[tuple[float, str]] = field(default_factory=list)  # when, what
    lost: bool = False  # some rank hangs or died, so the pool is of no more use

    def report(self, title: str, text: str, *, when: float) -> None:
        """Note what went wrong on one rank."""
        self.problems.append((when, f"---- {title} ----\n{text.rstrip()}\n"))

    def text(self) -> str:
        """All problems, the earliest first: one rank's mistake often fails the others later."""
        return "\n".join(text for _, text in sorted(self.problems))


class RankPool:
    """Up to ``MAX_WORLD`` processes, started when a job first needs them."""

    def __init__(
        self, warning_filters: Sequence[str] = (), lanes: Counter[str] | None = None
    ) -> None:
        """``lanes``: run every job under the checker of ``tests/lanes``, and add its figures."""
        self._warning_filters = tuple(warning_filters)
        self._lanes = lanes
        self._ranks: list[Rank] = []
        self._store: dist.TCPStore | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._group = 0  # number of the newest process group
        self._group_world: int | None = None  # its world; None: the next job makes another

    def run(
        self,
        world: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        process_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on ranks 0 to ``world - 1``; their results in rank order.

        ``fn`` stands at the top of a module and finds the default gloo group of exactly ``world``
        ranks, or none with ``process_group=False``. Arguments and results are copies.

        Raises:
            RankError: a rank raised, died, or gave no answer within ``timeout_s`` seconds; or the
                ranks did not run the same number of collectives.
        """
        __tracebackhide__ = True
        if not 1 <= world <= MAX_WORLD:
            raise ValueError(f"world is {world}, the pool has 1 to {MAX_WORLD} ranks")
        if "<locals>" in getattr(fn, "__qualname__", "") or "<lambda>" in str(fn):
            raise TypeError(f"{fn} must stand at the top of a module: ranks import it by name")
        name = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', fn)}"
        call = (fn, args, kwargs) if self._lanes is None else (checked, (fn, *args), kwargs)
        job = worker.Job(
            call=pickle.dumps(call),
            world=world,
            group=self._choose_group(world if process_group else None),
        )
        replies = self._round(job, name, timeout_s)
        if process_group:
            settle = worker.Job(pickle.dumps((_settle, (), {})), world, job.group)
            self._round(settle, f"the barrier after {name}", SETTLE_TIMEOUT_S)
        if not all(reply.same_group for reply in replies):
            self._group_world = None
        results = [pickle.loads(reply.result) for reply in replies]
        if self._lanes is None:
            return results
        for result in results:
            self._lanes.update(result.figures)
        return [result.result for result in results]

    def close(self) -> None:
        """End the processes; a later ``run`` starts new ones."""
        for rank in self._ranks:
            rank.kill()
        self._ranks.clear()
        self._group_world = None
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _choose_group(self, world: int | None) -> int | None:
        """The newest group if it fits, else the number of a new one, which the ranks then make.

        A number is never used twice, not even after a job without a group in between: the store
        still holds the addresses of the old group's sockets under it.
        """
        if self._group_world != world:
            self._group += 1
            self._group_world = world
        return self._group if world is not None else None

    def _round(self, job: worker.Job, name: str, timeout_s: float) -> list[worker.Reply]:
        """Hand the job to its ranks and wait for all of them."""
        __tracebackhide__ = True
        self._start(job.world)
        ranks = self._ranks[: job.world]
        try:
            for rank in ranks:
                rank.pipe.send_bytes(pickle.dumps(job))
            outcome = _collect(ranks, timeout_s)
        except BaseException:  # Ctrl-C between question and answer: nobody will read the answer
            self.close()
            raise
        if not outcome.problems:
            return [outcome.replies[rank.number] for rank in ranks]
        self._group_world = None
        if outcome.lost:
            self.close()
        raise RankError(f"{name} failed on {job.world} ranks\n\n{outcome.text()}")

    def _start(self, world: int) -> None:
        """Make sure that there are ``world`` processes, all of them through their imports."""
        if self._store is None:
            self._store = dist.TCPStore(worker.HOST, 0, is_master=True, wait_for_workers=False)
            self._folder = tempfile.TemporaryDirectory(prefix="fullshard-ranks-")
        new = [self._spawn(number) for number in range(len(self._ranks), world)]
        self._ranks += new
        for rank in new:
            if not rank.pipe.poll(START_TIMEOUT_S):
                self.close()
                raise RankError(f"rank {rank.number} did not start in {START_TIMEOUT_S:.0f} s")
            try:
                rank.pipe.recv_bytes()
            except EOFError:
                self.close()
                raise RankError(f"rank {rank.number} died while starting") from None

    def _spawn(self, number: int) -> Rank:
        """Start one process; it says "ready" through its pipe later."""
        assert self._store is not None and self._folder is not None
        path = Path(self._folder.name) / f"rank{number}.txt"
        station = worker.Station(number, self._store.port, str(path), self._warning_filters)
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=worker.main, args=(station, theirs), daemon=True)
        process.start()
        theirs.close()  # so that a dead process shows as the end of the pipe
        return Rank(number, process, ours, path)


def _collect(ranks: Sequence[Rank], timeout_s: float) -> Outcome:
    """Every rank's reply; once one fails, the others have ``GRACE_S`` left."""
    outcome = Outcome()
    start = time.monotonic()
    deadline = start + timeout_s
    pending = {rank.pipe: rank for rank in ranks}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank in pending.values() if rank.pipe in ready]:
            _receive(rank, outcome)
            del pending[rank.pipe]
        if outcome.problems:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    waited_s = time.monotonic() - start
    for rank in pending.values():
        outcome.lost = True
        title = f"rank {rank.number} still running after {waited_s:.1f} s"
        outcome.report(title, rank.stack(), when=time.monotonic())
    return outcome


def _receive(rank: Rank, outcome: Outcome) -> None:
    """Take one rank's reply, or note that there will be none."""
    try:
        reply: worker.Reply = pickle.loads(rank.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        rank.process.join()
        outcome.lost = True
        title = f"rank {rank.number} died, exit code {rank.process.exitcode}"
        outcome.report(title, rank.stack(), when=0.0)
        return
    outcome.replies[rank.number] = reply
    if reply.error:
        outcome.report(f"rank {rank.number} raised", reply.error, when=reply.failed_at_s)


def _settle() -> None:
    """Meet the other ranks.

    A test whose ranks ran different numbers of collectives gets stuck here and fails itself;
    without this the next test would meet its leftovers.
    """
    if dist.is_initialized():
        dist.barrier()
