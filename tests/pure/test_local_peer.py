"""A record that cannot be sent fails on both ends; closed connections end at once."""

from __future__ import annotations

import os
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fullshard.comm import local_peer
from fullshard.comm.local_peer import LocalPeer, Record
from fullshard.comm.memory import LentMemory, Memory
from fullshard.errors import LostRankError

LARGE = Record(0, 0, 0, 0, (), "x" * 8_000_000).packed()
"""More bytes than a socket buffers."""


@pytest.fixture
def ends() -> Iterator[tuple[LocalPeer, socket.socket]]:
    """Yield a peer, and the socket at its other end."""
    own, other = socket.socketpair()
    other.settimeout(10)
    peer = LocalPeer(1, own, LentMemory(Memory().opened_for_reading()), 30.0)
    yield peer, other
    other.close()
    peer.close()


def read_to_end(end: socket.socket) -> int:
    nbytes = 0
    while part := end.recv(1 << 20):
        nbytes += len(part)
    return nbytes


def test_a_thread_that_cannot_start(
    ends: tuple[LocalPeer, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, other = ends

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        peer.send(LARGE)
    assert read_to_end(other) < len(LARGE)
    with pytest.raises(LostRankError):
        peer.receive()


def test_a_thread_that_fails(
    ends: tuple[LocalPeer, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, other = ends
    send = local_peer._Outbox._send

    def fail(outbox: local_peer._Outbox, packed: bytes) -> int:
        if threading.current_thread().name == "fullshard-outbox":
            raise MemoryError
        return send(outbox, packed)

    monkeypatch.setattr(local_peer._Outbox, "_send", fail)
    peer.send(LARGE)
    assert read_to_end(other) < len(LARGE)
    with pytest.raises(LostRankError):
        peer.receive()


@contextmanager
def forked() -> Iterator[None]:
    """Keep an idle child process, forked from this one, during the block."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other tests may leave threads running
        pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    try:
        yield
    finally:
        os.close(writing)
        os.waitpid(pid, 0)


def test_children_do_not_keep_the_connections_of_a_host(
    ends: tuple[LocalPeer, socket.socket],
) -> None:
    """DataLoader workers outlive a killed rank, and must not hide its end from other ranks."""
    peer, other = ends
    with forked():
        peer.close()
        assert read_to_end(other) == 0
