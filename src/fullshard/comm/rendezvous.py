"""Discovery of which ranks of a process group share a host, and connections among them.

The ranks exchange socket names and secrets through the store, then connect. A fault ends a
rendezvous at any moment: in the next era, ranks have another one, under another name. A fault
does not end the connecting of gloo groups between hosts, which follows (``OwnGroups.of``).
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
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from fullshard._torch import collectives as _collectives
from fullshard.comm.fault_domain import Era
from fullshard.comm.handshake import NBYTES, Handshake, PeerInfo, listen
from fullshard.comm.liveness import Liveness
from fullshard.comm.memory import LentMemory, Memory
from fullshard.comm.own_store import own_store
from fullshard.comm.store_round import Missing, StoreRound
from fullshard.comm.text import named_ranks
from fullshard.errors import ConfigError, LostRankError

log = logging.getLogger("fullshard")

TRANSPORT = "FULLSHARD_TRANSPORT"
"""Environment variable: the transport between ranks on CPUs over gloo, one of ``Wish``."""
SWITCH = "FULLSHARD_SHARED_MEMORY"
"""Environment variable; a rank on which it is 0 shares memory with no other. If hosts then have
different numbers of ranks that do, no rank shares memory."""
HOST = "FULLSHARD_HOST"
"""Environment variable; ranks on which it differs share no memory, as if on different hosts."""


class Wish(enum.StrEnum):
    """The transport that a rank asks for."""

    AUTO = "auto"
    """Shared memory within a host where it works, gloo between hosts."""
    SHARED = "shared"
    """As ``AUTO``, but an error if ranks of one host do not share memory."""
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


class LocalConnection(NamedTuple):
    """A connection to another rank of this host."""

    connection: socket.socket
    memory: LentMemory


class Rendezvous(NamedTuple):
    """The result of ``meet``; all ranks have the same ``hosts`` and ``name``."""

    hosts: tuple[tuple[int, ...], ...]
    """Groups of ranks that read each other's memory; each rank is in one, perhaps by itself."""
    name: str
    """A name that no other rendezvous of the job has."""
    memory: Memory
    """This rank's memory, which the other ranks of its host read."""
    peers: Mapping[int, LocalConnection]
    """The other ranks of this rank's host, beginning with the next higher rank."""


def groups_by_key(keys: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Return groups of the ranks with equal keys, in the order of their first ranks."""
    groups: dict[Hashable, list[int]] = {}
    for rank, key in enumerate(keys):
        groups.setdefault(key, []).append(rank)
    return tuple(map(tuple, groups.values()))


_LOOK_S = 0.5
"""Seconds between two looks at ranks that have not come."""


class _Exchange:
    """Texts that the ranks of a group publish to each other through the store, one after another.

    The first rank collects them, so that the others read one text, not one of each rank.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, era: Era) -> None:
        """``name``: of this rendezvous among all of the group."""
        self.rank, self.world = group.rank(), group.size()
        self._ranks = dist.get_process_group_ranks(group)
        whose = _digest(" ".join(map(str, self._ranks)).encode()).hex()
        self.name = f"fullshard/rendezvous/{group.group_name}/{whose}/{name}"
        self._store = own_store()
        self._era = era
        self._timeout_s = _collectives.timeout_of(group, "cpu").total_seconds()
        if self.rank:  # the first rank waits for all ranks before the others read its text
            self._timeout_s *= 2
        self._until_s = time.monotonic() + self._timeout_s
        self._liveness = Liveness(self._store)
        self._next_look_s = 0.0
        self._number = 0
        self._last: StoreRound | None = None

    def all_texts(self, own: bytes) -> list[bytes]:
        """Publish ``own``; return what each rank published.

        Raises:
            LostRankError: a rank has ended, or published nothing before the time-out of the group.
            FullshardError: a fault has ended the era.
        """
        now = StoreRound(self._store, f"{self.name}/{self._number}")
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

    def _look(self, missing: Missing) -> Collection[int]:
        self._era.check()
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
                f"{late} did not connect to {named_ranks(self._ranks)} within the "
                f"{self._timeout_s:.0f} s that this rank waits"
            )
        return ()


def meet(group: dist.ProcessGroup, name: str, era: Era) -> Rendezvous | None:
    """Connect the ranks of ``group`` that can share memory; a collective.

    Ranks share memory if they run on one host as one user, and neither the system nor a variable
    forbids it. No rank shares memory if the groups of ranks that could differ in size: a host with
    one rank would have to send and add up as much as all ranks of a larger host together.

    Args:
        group: the ranks.
        name: differs for each rendezvous of the group, and is equal on all ranks.
        era: the current era; a fault that ends it ends the rendezvous, too.

    Returns:
        The rendezvous; None on all ranks if any rank asks for ``Wish.BACKEND`` or runs on a system
        without shareable memory.

    Raises:
        ConfigError: on all ranks, if one asks for ``Wish.SHARED`` and ranks of one host cannot
            share memory, if one asks for a transport that does not exist, or if ranks run versions
            of fullshard that cannot connect.
        LostRankError: a rank has ended, or has not come before the time-out of ``group``.
        FullshardError: a fault has ended ``era``.
    """
    exchange = _Exchange(group, name, era)
    rank, world = exchange.rank, exchange.world
    socket_name, secret = secrets.token_bytes(NBYTES), secrets.token_bytes(NBYTES)
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.socket(socket.AF_UNIX))
        memory = _memory()
        may_share = memory is not None and os.environ.get(SWITCH) != "0"
        if may_share and listen(listening, socket_name):
            place = _digest(own_host() + str(os.geteuid()).encode())
        else:
            place = secrets.token_bytes(NBYTES)
        own = PeerInfo(place, socket_name, secret, _digest(own_host()), _wish()).packed()
        infos = _unpacked(exchange.all_texts(own))
        wishes = [one.wish for one in infos]
        _check_wishes(wishes)
        if Wish.BACKEND in wishes:
            return None
        hosts = groups_by_key([one.place for one in infos])
        host = _host_of(hosts)[rank]
        handshake = Handshake(rank, infos, set(host) - {rank}, memory)
        opened.callback(handshake.close)
        has_met = handshake.meet_all(listening, era.check)
        flags = exchange.all_texts(bytes([has_met, memory is not None]))
        have_met = {h: all(flags[member][0] for member in h) for h in hosts}
        hosts = groups_by_key([h if have_met[h] else r for r, h in sorted(_host_of(hosts).items())])
        if len(set(map(len, hosts))) > 1:
            hosts = groups_by_key(range(world))
        if Wish.SHARED in wishes:
            _check_shared(hosts, [one.host for one in infos])
        if memory is None or not all(flag[1] for flag in flags):
            return None
        host = _host_of(hosts)[rank]
        met = handshake.taken() if len(host) > 1 else {}
    order = [r for r in (*range(rank + 1, world), *range(rank)) if r in met]
    peers = {r: LocalConnection(met[r].connection, LentMemory(met[r].fd)) for r in order}
    return Rendezvous(hosts, exchange.name, memory, peers)


def _unpacked(packed: Sequence[bytes]) -> list[PeerInfo]:
    """Return the messages of all ranks; raise on all if their versions differ."""
    found = {one[0] for one in packed}
    if len(found) > 1:
        ranks = groups_by_key([one[0] for one in packed])
        raise ConfigError(
            "ranks run versions of fullshard that cannot connect: "
            + ", ".join(
                f"{named_ranks(r)} version {packed[r[0]][0]} of the protocol" for r in ranks
            )
            + "; install the same version on all hosts"
        )
    return [PeerInfo.unpacked(one) for one in packed]


def _check_shared(hosts: Sequence[tuple[int, ...]], names: Sequence[bytes]) -> None:
    """Raise if ranks of one host do not share memory."""
    for apart in groups_by_key(names):
        if apart not in hosts:
            raise ConfigError(
                f"{TRANSPORT}={Wish.SHARED}: {named_ranks(apart)} of the process group are on one "
                f"host, but cannot share memory: their users differ, {SWITCH}=0 is set on a rank, "
                "the system refuses, or hosts have different numbers of ranks. Set "
                f"{TRANSPORT}={Wish.AUTO} to let such ranks exchange by gloo"
            )


def _host_of(hosts: Iterable[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Return the host of every rank."""
    return {rank: host for host in hosts for rank in host}


def _memory() -> Memory | None:
    """Return memory for what this rank sends, or None where the system has no such files."""
    if not hasattr(os, "memfd_create"):
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
