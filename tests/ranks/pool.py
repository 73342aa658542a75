"""One pool of gloo processes for the whole test session.

    @on_ranks(2, 3)
    def test_gather(world):        # at module level; runs on each rank, torch.distributed is ready
        assert gather_ranks() == list(range(world))

    def test_gather_to_one(pool):
        assert pool.run(2, gather_to_one) == [[0, 1], None]    # every rank's result, in rank order

Starting a process and importing torch takes seconds; a job on a running process takes a
millisecond. Functions are sent by name, arguments and results by value. Plain pickle copies
tensors, while multiprocessing's pickler would pass file descriptors of shared memory.

If a rank raises, the test fails with the rank's traceback. If a rank hangs or dies, the test fails
with the rank's Python stack, every process of the pool is killed, and the next job starts new ones.
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
GRACE_S = 2.0  # the time that the other ranks have to answer after one has failed

every_world = pytest.mark.parametrize("world", [2, 3, 4])


def on_ranks(*worlds: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the body of a test on every rank, once for each of ``worlds``; ``options`` go to ``run``.

    The test is defined at module level and takes fixtures and parameters as any other does. If
    there are several worlds, the test may take ``world`` too. The process group is ready.
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
    """A failed job; the message has each failing rank's error and each stuck rank's stack."""


@dataclass
class Rank:
    """A process of the pool, as the test session sees it."""

    number: int
    process: BaseProcess
    pipe: Connection
    stack_path: Path

    def stack(self, timeout_s: float = 2.0) -> str:
        """Return the process's Python stacks; a signal handler writes them, even in a C++ wait."""
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
        """Kill this process, even if it hangs."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


@dataclass
class Outcome:
    """The replies and problems of the ranks of one job."""

    replies: dict[int, worker.Reply] = field(default_factory=dict)
    problems: list[tuple[float, str]] = field(default_factory=list)  # time of failure, text
    lost: bool = False  # True: a rank hangs or died, so the pool cannot be used again

    def report(self, title: str, text: str, *, when: float) -> None:
        """Record a failure of one rank."""
        self.problems.append((when, f"---- {title} ----\n{text.rstrip()}\n"))

    def text(self) -> str:
        """Return all problems, earliest first: one rank's failure often causes the others'."""
        return "\n".join(text for _, text in sorted(self.problems))


class RankPool:
    """A pool of up to ``MAX_WORLD`` processes, which start when a job first needs them."""

    def __init__(
        self, warning_filters: Sequence[str] = (), lanes: Counter[str] | None = None
    ) -> None:
        """Prepare the pool; ``lanes`` sums the counts of the ``tests/lanes`` checker over jobs."""
        self._warning_filters = tuple(warning_filters)
        self._lanes = lanes
        self._ranks: list[Rank] = []
        self._store: dist.TCPStore | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._group = 0  # number of the newest process group
        self._group_world: int | None = None  # its size; None: the next job makes a new group

    def run(
        self,
        world: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        process_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on ranks 0 to ``world - 1``; return results in rank order.

        ``fn`` is defined at module level and finds the default gloo group of exactly ``world``
        ranks, or no group with ``process_group=False``. Arguments and results are copies.

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
        """Return the newest group's number if its size fits, else a new number.

        A number is never used twice, even if a job without a group ran in between: under the old
        number the store still holds socket addresses of the old group.
        """
        if self._group_world != world:
            self._group += 1
            self._group_world = world
        return self._group if world is not None else None

    def _round(self, job: worker.Job, name: str, timeout_s: float) -> list[worker.Reply]:
        """Send the job to its ranks and wait for all of them."""
        __tracebackhide__ = True
        self._start(job.world)
        ranks = self._ranks[: job.world]
        try:
            for rank in ranks:
                rank.pipe.send_bytes(pickle.dumps(job))
            outcome = _collect(ranks, timeout_s)
        except BaseException:  # e.g. Ctrl-C: nobody would read the replies, so end the ranks
            self.close()
            raise
        if not outcome.problems:
            return [outcome.replies[rank.number] for rank in ranks]
        self._group_world = None
        if outcome.lost:
            self.close()
        raise RankError(f"{name} failed on {job.world} ranks\n\n{outcome.text()}")

    def _start(self, world: int) -> None:
        """Ensure that ``world`` processes run and have finished their imports."""
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
        """Start one process, which sends "ready" through its pipe later."""
        assert self._store is not None and self._folder is not None
        path = Path(self._folder.name) / f"rank{number}.txt"
        station = worker.Station(number, self._store.port, str(path), self._warning_filters)
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=worker.main, args=(station, theirs), daemon=True)
        process.start()
        theirs.close()  # so that the death of the process closes the pipe
        return Rank(number, process, ours, path)


def _collect(ranks: Sequence[Rank], timeout_s: float) -> Outcome:
    """Return every rank's reply; after the first failure, the others get ``GRACE_S`` seconds."""
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
    """Read one rank's reply, or record that the rank died."""
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
    """Meet the other ranks at a barrier.

    A test whose ranks ran different numbers of collectives hangs here and fails. Without the
    barrier, the next test would receive the leftover collectives.
    """
    if dist.is_initialized():
        dist.barrier()
