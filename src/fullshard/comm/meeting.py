"""Discovery of which ranks of a process group share a host, and connections among them.

The ranks exchange names, addresses and keys through the store, and connect to each other. A fault
ends a meeting at any moment: ranks meet again in the next era, under another name.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch.distributed as dist

from fullshard import _torch
from fullshard.comm.addresses import listener
from fullshard.comm.desks import NBYTES, Desk, NearDesk, Told, listen
from fullshard.comm.fault_domain import Era
from fullshard.comm.liveness import Liveness
from fullshard.comm.memory import LentMemory, Memory
from fullshard.comm.own_store import own_store
from fullshard.comm.routes import Routes, circles_of
from fullshard.comm.store_round import Missing, StoreRound
from fullshard.comm.text import named_ranks
from fullshard.errors import ConfigError, LostRankError, UnsupportedError

log = logging.getLogger("fullshard")

TRANSPORT = "FULLSHARD_TRANSPORT"
"""Environment variable: the transport between ranks on CPUs over gloo, one of ``Wish``."""
SWITCH = "FULLSHARD_SHARED_MEMORY"
"""Environment variable; a rank on which it is 0 shares memory with no other."""
HOST = "FULLSHARD_HOST"
"""Environment variable; ranks on which it differs share no memory, as if on different hosts."""


class Wish(enum.StrEnum):
    """The transport that a rank asks for."""

    AUTO = "auto"
    """Shared memory within a host where it works, messages between hosts."""
    SHARED = "shared"
    """As ``AUTO``, but ranks of one host that cannot share memory are an error."""
    BACKEND = "backend"
    """The process group's own collectives, if any rank asks for them."""


def _wish() -> str:
    """Return the value of the variable TRANSPORT of this rank, which may be none of ``Wish``."""
    if os.environ.get(SWITCH) == "0" and SWITCH not in _warned_of:
        _warned_of.add(SWITCH)
        log.warning(
            "%s=0: this rank does not share memory with other ranks. To use the process group's "
            "own collectives, set %s=%s on any rank", SWITCH, TRANSPORT, Wish.BACKEND,
        )  # fmt: skip
    return os.environ.get(TRANSPORT, Wish.AUTO)


_warned_of: set[str] = set()


def _check_wishes(wishes: Sequence[str]) -> None:
    """Raise on all ranks if one asks for a transport that does not exist."""
    for rank, given in enumerate(wishes):
        if given not in list(Wish):
            raise ConfigError(
                f"{TRANSPORT}={given!r} on rank {rank} of the process group: expected one of "
                f"{', '.join(Wish)}"
            )


class Met(NamedTuple):
    """A connection to another rank of this host."""

    connection: socket.socket
    memory: LentMemory


class Meeting(NamedTuple):
    """The result of ``meet``; all ranks have the same ``circles``."""

    circles: tuple[tuple[int, ...], ...]
    """The ranks that read each other's memory; every rank is in one circle, perhaps alone."""
    memory: Memory | None = None
    """This rank's memory, readable by all other ranks of its circle; None if it is alone."""
    neighbours: Mapping[int, Met] = MappingProxyType({})
    """The other ranks of this rank's circle, beginning with the next higher rank."""
    partners: Mapping[int, socket.socket] | None = MappingProxyType({})
    """Connections to the ``Routes.partners``; None on all ranks if one failed or for BACKEND."""


_LOOK_S = 0.5
"""Seconds between two looks at ranks that have not come."""


class _Exchange:
    """Texts that the ranks of a group publish to each other through the store, one after another.

    The first rank collects them, so that the others read one text, not one of each rank.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, era: Era) -> None:
        """``name``: of this meeting among all meetings of the group."""
        self.rank, self.world = group.rank(), group.size()
        self._ranks = dist.get_process_group_ranks(group)
        whose = _digest(" ".join(map(str, self._ranks)).encode()).hex()
        self._name = f"fullshard/meeting/{group.group_name}/{whose}/{name}"
        self._store = own_store()
        self._era = era
        self._timeout_s = _torch.timeout_of(group, "cpu").total_seconds()
        self._until_s = time.monotonic() + self._timeout_s
        self._liveness = Liveness(self._store)
        self._next_look_s = 0.0
        self._number = 0
        self._last: StoreRound | None = None

    def told(self, own: bytes) -> list[bytes]:
        """Publish ``own``; return what each rank published.

        Raises:
            LostRankError: a rank has ended, or published nothing before the time-out of the group.
            FullshardError: a fault has ended the era.
        """
        now = StoreRound(self._store, f"{self._name}/{self._number}")
        self._number += 1
        now.publish(self.rank, own.hex())
        if self.rank == 0:
            texts = now.collect(range(self.world), self._look)
            now.decide_once(" ".join(texts[rank] for rank in range(self.world)))
        texts_of_all = now.decision(lambda: self._look(lambda: [0])).split(" ")
        now.forget([self.rank])
        if self._last is not None and self.rank == 0:
            self._last.forget(decision=True)  # all ranks have read it, as they went on
        self._last = now
        return [bytes.fromhex(text) for text in texts_of_all]

    def check(self) -> None:
        """Raise the error of the fault, if one has ended the era."""
        self._era.check()

    def _look(self, missing: Missing) -> Collection[int]:
        self.check()
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return ()
        self._next_look_s = now_s + _LOOK_S
        ranks = [self._ranks[rank] for rank in missing()]
        if gone := [rank for rank in ranks if self._liveness.is_dead(rank)]:
            raise LostRankError(f"{named_ranks(gone)} ended before the ranks had connected")
        if now_s > self._until_s:
            late = named_ranks(ranks)
            raise LostRankError(
                f"{late} did not come to connect to {named_ranks(self._ranks)} within the "
                f"{self._timeout_s:.0f} s that their process group waits"
            )
        return ()


def meet(group: dist.ProcessGroup, name: str, era: Era) -> Meeting:
    """Meet the other ranks of ``group``; a collective.

    Ranks share memory if they run on one host as one user, and can and may share memory.

    Args:
        group: the ranks.
        name: differs for each meeting of the group, and is equal on all ranks.
        era: the era that ends the meeting with it.

    Raises:
        ConfigError: on all ranks, if one asks for ``Wish.SHARED`` and ranks of one host cannot
            share memory, or if one asks for a transport that does not exist.
        LostRankError: a rank has not come before the time-out of ``group``.
        FullshardError: a fault has ended ``era``.
    """
    exchange = _Exchange(group, name, era)
    rank, world = exchange.rank, exchange.world
    socket_name, secret = secrets.token_bytes(NBYTES), secrets.token_bytes(NBYTES)
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.socket(socket.AF_UNIX))
        memory = _memory()
        if memory is not None and listen(listening, socket_name):
            place = _digest(own_host() + str(os.geteuid()).encode())
        else:
            place = secrets.token_bytes(NBYTES)
        wished = _wish().encode()[:NBYTES].ljust(NBYTES, b"\0")
        about = _digest(own_host()) + wished
        own = place + socket_name + secret + about
        told = [Told.unpacked(one) for one in exchange.told(own)]
        wishes = [one.wish for one in told]
        _check_wishes(wishes)
        if Wish.BACKEND in wishes:
            return Meeting(tuple((one,) for one in range(world)), partners=None)
        circles = circles_of([one.place for one in told])
        circle = Routes(circles, rank).own
        desk = NearDesk(rank, told, set(circle) - {rank}, memory)
        opened.callback(desk.close)
        flags = exchange.told(bytes([desk.meet_all(listening, exchange.check)]))
        has_met = {c: all(flags[member] == b"\1" for member in c) for c in circles}
        circles = circles_of([c if has_met[c] else r for r, c in _by_rank(circles)])
        if Wish.SHARED in wishes:
            _check_shared(circles, [one.host for one in told])
        met = desk.taken() if has_met[circle] else {}
    order = [r for r in (*range(rank + 1, world), *range(rank)) if r in met]
    neighbours = {r: Met(met[r].connection, LentMemory(met[r].fd)) for r in order}
    partners = _partners(exchange, Routes(circles, rank)) if len(circles) > 1 else {}
    return Meeting(circles, memory if neighbours else None, neighbours, partners)


def _check_shared(circles: tuple[tuple[int, ...], ...], hosts: Sequence[bytes]) -> None:
    """Raise if ranks of one host do not share memory."""
    for apart in circles_of(hosts):
        if apart not in circles:
            raise ConfigError(
                f"{TRANSPORT}={Wish.SHARED}: {named_ranks(apart)} of the process group are on one "
                f"host, but cannot share memory: their users differ, {SWITCH}=0 is set on a rank, "
                f"or the system refuses. Set {TRANSPORT}={Wish.AUTO} to run without shared memory"
            )


def _partners(exchange: _Exchange, routes: Routes) -> dict[int, socket.socket] | None:
    """Connect to the ranks of other circles that this rank exchanges messages with."""
    with contextlib.ExitStack() as opened:
        listening, address, port = None, bytes(NBYTES), 0
        with contextlib.suppress(OSError, UnsupportedError):
            listening, address = listener()
            opened.callback(listening.close)
            port = listening.getsockname()[1]
        secret = secrets.token_bytes(NBYTES)
        own = address + port.to_bytes(NBYTES) + secret + bytes(2 * NBYTES)
        told = [Told.unpacked(one) for one in exchange.told(own)]
        desk = Desk(exchange.rank, told, set(routes.partners))
        opened.callback(desk.close)
        has_met = False
        if listening is not None and all(any(one.place) for one in told):
            has_met = desk.meet_all(listening, exchange.check)
        if any(flag != b"\1" for flag in exchange.told(bytes([has_met]))):
            return None
        return {peer: call.connection for peer, call in desk.taken().items()}


def _by_rank(circles: Iterable[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """Return every rank with its circle, in the order of ranks."""
    return sorted((rank, circle) for circle in circles for rank in circle)


def _memory() -> Memory | None:
    """Return memory to share, or None if this process cannot or must not share memory."""
    if os.environ.get(SWITCH) == "0" or not hasattr(os, "memfd_create"):
        return None
    try:
        memory = Memory()
        memory.grow(1)
    except (OSError, RuntimeError):
        return None
    return memory


def own_host() -> bytes:
    """Return a value that is equal for processes of one host, which see the same socket names.

    The value is a digest of the machine's boot ID, the network namespace and the variable HOST.
    """
    given = os.environ.get(HOST, "").encode()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        return _digest(boot + os.readlink("/proc/self/ns/net").encode() + given)
    except OSError:
        return _digest(socket.gethostname().encode() + given)  # not Linux


def _digest(what: bytes) -> bytes:
    return hashlib.blake2b(what, digest_size=NBYTES).digest()
