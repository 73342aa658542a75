"""Discovery of which ranks of a process group share a host, and connections among them.

The ranks exchange names, addresses and keys through the process group, and connect to each other.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import logging
import os
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard import _torch
from fullshard.comm.addresses import listener
from fullshard.comm.desks import NBYTES, Desk, NearDesk, Told, listen
from fullshard.comm.memory import LentMemory, Memory
from fullshard.comm.routes import Routes, circles_of
from fullshard.comm.text import named_ranks
from fullshard.errors import ConfigError, UnsupportedError

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


def meet(group: dist.ProcessGroup) -> Meeting:
    """Meet the other ranks of ``group``; a collective.

    Ranks share memory if they run on one host as one user, and can and may share memory.

    Raises:
        ConfigError: on all ranks, if one asks for ``Wish.SHARED`` and ranks of one host cannot
            share memory, or if one asks for a transport that does not exist.
    """
    rank, world = group.rank(), group.size()
    name = secrets.token_bytes(NBYTES)
    keys = [secrets.token_bytes(NBYTES) for _ in range(world)]
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.socket(socket.AF_UNIX))
        memory = _memory()
        if memory is not None and listen(listening, name):
            place = _digest(own_host() + str(os.geteuid()).encode())
        else:
            place = secrets.token_bytes(NBYTES)
        wished = _wish().encode()[:NBYTES].ljust(NBYTES, b"\0")
        about = _digest(own_host()) + wished
        told = [Told.unpacked(s) for s in _told(group, [place + name + k + about for k in keys])]
        wishes = [one.wish for one in told]
        _check_wishes(wishes)
        if Wish.BACKEND in wishes:
            return Meeting(tuple((one,) for one in range(world)), partners=None)
        circles = circles_of([one.place for one in told])
        circle = Routes(circles, rank).own
        desk = NearDesk(rank, told, keys, set(circle) - {rank}, memory)
        opened.callback(desk.close)
        flags = _told(group, [bytes([desk.meet_all(listening)])] * world)
        has_met = {c: all(flags[member] == b"\1" for member in c) for c in circles}
        circles = circles_of([c if has_met[c] else r for r, c in _by_rank(circles)])
        if Wish.SHARED in wishes:
            _check_shared(circles, [one.host for one in told])
        met = desk.taken() if has_met[circle] else {}
    order = [r for r in (*range(rank + 1, world), *range(rank)) if r in met]
    neighbours = {r: Met(met[r].connection, LentMemory(met[r].fd)) for r in order}
    partners = _partners(group, Routes(circles, rank)) if len(circles) > 1 else {}
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


def _partners(group: dist.ProcessGroup, routes: Routes) -> dict[int, socket.socket] | None:
    """Connect to the ranks of other circles that this rank exchanges messages with."""
    rank, world = group.rank(), group.size()
    keys = [secrets.token_bytes(NBYTES) for _ in range(world)]
    with contextlib.ExitStack() as opened:
        listening, address, port = None, bytes(NBYTES), 0
        with contextlib.suppress(OSError, UnsupportedError):
            listening, address = listener()
            opened.callback(listening.close)
            port = listening.getsockname()[1]
        said = [address + port.to_bytes(NBYTES) + key + bytes(2 * NBYTES) for key in keys]
        told = [Told.unpacked(one) for one in _told(group, said)]
        desk = Desk(rank, told, keys, set(routes.partners))
        opened.callback(desk.close)
        has_met = False
        if listening is not None and all(any(one.place) for one in told):
            has_met = desk.meet_all(listening)
        if any(flag != b"\1" for flag in _told(group, [bytes([has_met])] * world)):
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


def _told(group: dist.ProcessGroup, own: Sequence[bytes]) -> list[bytes]:
    """Send ``own[r]`` to rank r; return what each rank sent us. All messages are equally long."""
    said = torch.tensor(list(b"".join(own)), dtype=torch.uint8, device="cpu")
    heard = torch.empty_like(said)
    work = _torch.all_to_all(group, heard, said)
    if work is not None:
        work.wait()
    return [bytes(row.tolist()) for row in heard.view(group.size(), -1)]


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
