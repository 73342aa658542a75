"""Collectives among the ranks of one column: those that have the same index on each host.

They run in gloo groups of fullshard's own. The data of gathers, reductions and means begins with
the digest of its collective.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._torch import world as _world
from fullshard.comm.heartbeat import stall_s
from fullshard.comm.labels import AMONG_HOSTS
from fullshard.comm.liveness import losing_ranks
from fullshard.comm.shared import HostExchange
from fullshard.errors import LostRankError, ProtocolError

HEAD_NBYTES = 64
"""Size of the digest in front of the data of a gather, a reduction or a mean."""
_MOST_GROUPS = 4
"""Most groups of one kind in a column. A group takes three threads and a connection per host."""


class OwnGroups(NamedTuple):
    """Gloo groups that belong to fullshard alone, of ranks of one process group."""

    everyone: dist.ProcessGroup
    """All ranks, for all-to-all exchanges and to compare labels."""
    gathers: Sequence[dist.ProcessGroup]
    """This rank's column, once for each host: the group in which that host sends its shards.

    There are at most ``_MOST_GROUPS`` groups. A gloo receiver first sends "ready" on the connection
    that then carries the data. If both ends of a connection sent data, each "ready" would queue
    behind data, and the ends would send in turns instead of at the same time.
    """
    reductions: Sequence[dist.ProcessGroup]
    """The same in further groups, in which hosts send their sums. Gloo matches the collectives of a
    group by their order, and ranks may start a reduction before or after a later gather."""

    def all(self) -> list[dist.ProcessGroup]:
        """Return all groups."""
        return list(dict.fromkeys([self.everyone, *self.gathers, *self.reductions]))

    @classmethod
    def of(
        cls, name: str, hosts: Sequence[Sequence[int]], rank: int, timeout: timedelta
    ) -> OwnGroups:
        """Make the groups of ``rank``, under a ``name`` that nobody else uses; a collective.

        A fault does not end this: a rank waits for an absent one for up to ``stall_s``.
        """
        host, index = next((h, host.index(rank)) for h, host in enumerate(hosts) if rank in host)
        stall = timedelta(seconds=stall_s())

        def column(kind: str) -> list[dist.ProcessGroup]:
            names = [f"{name}/{kind}/{index}/{one}" for one in range(_MOST_GROUPS)][: len(hosts)]
            made = [_world.own_gloo_group(n, host, len(hosts), timeout, stall) for n in names]
            return [made[sender % len(made)] for sender in range(len(hosts))]

        world = sum(map(len, hosts))
        with _new_threads_never_preempt():
            everyone = _world.own_gloo_group(f"{name}/all", rank, world, timeout, stall)
            return cls(everyone, column("gathers"), column("reductions"))


@contextmanager
def _new_threads_never_preempt() -> Iterator[None]:
    """Threads that start in this block never interrupt another thread.

    Gloo wakes a thread for every few packets. If all cores are busy, each wake-up would interrupt
    the training of a rank. ``SCHED_BATCH`` needs no privilege.
    """
    is_usual = False
    try:
        with suppress(OSError):  # refused in some sandboxes: slower, no less right
            is_usual = os.sched_getscheduler(0) == os.SCHED_OTHER  # other ways back need privileges
            if is_usual:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        yield
    finally:
        if is_usual:
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class EventFd:
    """A flag that threads of gloo set, and that ends a poll; one thread waits for it."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._fd).atexit = False  # gloo's threads may still set it

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self._fd

    def set(self) -> None:
        """Set the flag, from any thread."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Clear the flag."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)


class InFlight:
    """Collectives of a column under way.

    Gloo's threads refer to this object until the collectives have ended. It must not refer to a
    process group: destroying a group in one of that group's threads aborts the process.
    """

    def __init__(
        self,
        event: EventFd,
        then: Callable[[], None] | None = None,
        exchange: HostExchange | None = None,
    ) -> None:
        """Once all have ended well, ``then`` is called and ``exchange`` published.

        If they or ``then`` fail, the failure is published.
        """
        self.is_over = False
        self._failure: Exception | None = None
        self._event = event
        self._then = then
        self._exchange = exchange
        self._num_left = 1  # ``start`` counts until it has ended
        self._lock = threading.Lock()

    def start(
        self, works: Iterator[dist.Work], failure: BaseException | None = None
    ) -> BaseException | None:
        """Start ``works`` by iterating; return ``failure``, or an error that was raised here.

        ``failure``: this rank's own error, if any.
        """
        try:
            with losing_ranks(AMONG_HOSTS):
                for work in works:
                    with self._lock:
                        self._num_left += 1
                    work.get_future().then(self._take)
        except BaseException as error:
            failure = failure or error.with_traceback(None)
        self._count(failure)
        return failure

    def _take(self, future: torch.futures.Future[object]) -> None:
        failure = None
        try:
            with losing_ranks(AMONG_HOSTS):
                future.value()
        except Exception as error:
            failure = error.with_traceback(None)
        self._count(failure)

    def _count(self, failure: BaseException | None) -> None:
        if failure is not None and not isinstance(failure, Exception):
            failure = LostRankError(type(failure).__name__)
        with self._lock:
            self._failure = self._failure or failure
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            self._end()

    def _end(self) -> None:
        then, exchange = self._then, self._exchange
        self._then = self._exchange = None
        try:
            if then is not None and self._failure is None:
                then()
        except Exception as failure:
            self._failure = failure.with_traceback(None)
        try:
            if exchange is not None:
                exchange.publish(failure=_told(self._failure))
        except Exception as failure:
            self._failure = self._failure or failure.with_traceback(None)
        self.is_over = True
        self._event.set()

    def check(self) -> None:
        """Raise if the collectives failed."""
        if self._failure is not None:
            raise self._failure


def _told(failure: Exception | None) -> str:
    """Return the text of a failure, or "" without one."""
    return "" if failure is None else str(failure) or type(failure).__name__


def numbers_in(memory: Tensor, like: Tensor) -> Tensor:
    """Return the numbers at the start of the bytes ``memory``, as many as in ``like``."""
    return memory[: like.numel() * like.dtype.itemsize].view(like.dtype)


def head_of(exchange: HostExchange) -> Tensor:
    """Return the digest of an exchange, which is the same on all hosts."""
    digest = hashlib.blake2b(exchange.text().encode(), digest_size=HEAD_NBYTES).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def check_head(row: Tensor, exchange: HostExchange, rank: int) -> None:
    """Raise if ``rank`` sent these bytes for another collective, or failed in this one."""
    head = row[:HEAD_NBYTES]
    if torch.equal(head, head_of(exchange)):
        return
    if not head.any():
        raise LostRankError(f"rank {rank} of the process group failed in {exchange.text()}")
    raise ProtocolError(
        f"rank {rank} of the process group, on another host, sent data of another collective; this "
        f"rank runs {exchange.text()}. All ranks must run the same units of the same model in the "
        "same order"
    )
