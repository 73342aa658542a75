"""Notices that cannot be sent: both ends learn it."""

from __future__ import annotations

import os
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fullshard.comm import neighbours
from fullshard.comm.links import HostLink
from fullshard.comm.memory import LentMemory, Memory
from fullshard.comm.neighbours import Line, Notice
from fullshard.errors import LostRankError

LARGE = Notice(0, 0, 0, 0, (), "x" * 8_000_000).packed()
"""More than a socket takes."""


@pytest.fixture
def ends() -> Iterator[tuple[Line, socket.socket]]:
    """A line, and the socket of the rank at its other end."""
    own, other = socket.socketpair()
    other.settimeout(10)
    line = Line(1, own, LentMemory(Memory().opened_for_reading()))
    yield line, other
    other.close()
    line.close()


def read_to_end(end: socket.socket) -> int:
    nbytes = 0
    while part := end.recv(1 << 20):
        nbytes += len(part)
    return nbytes


def test_a_thread_that_cannot_start(
    ends: tuple[Line, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, other = ends

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        line.tell(LARGE)
    assert read_to_end(other) < len(LARGE)
    with pytest.raises(LostRankError):
        list(line.notices())


def test_a_thread_that_fails(
    ends: tuple[Line, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, other = ends
    send = neighbours._Outbox._send

    def fail(outbox: neighbours._Outbox, packed: bytes) -> int:
        if threading.current_thread().name == "fullshard-outbox":
            raise MemoryError
        return send(outbox, packed)

    monkeypatch.setattr(neighbours._Outbox, "_send", fail)
    line.tell(LARGE)
    assert read_to_end(other) < len(LARGE)
    with pytest.raises(LostRankError):
        list(line.notices())


@contextmanager
def forked() -> Iterator[None]:
    """A child that does nothing, forked from this process, for the block."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other tests may leave threads
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
    ends: tuple[Line, socket.socket],
) -> None:
    """Workers of a DataLoader outlive a rank that is killed, whose end the others wait to see."""
    line, other = ends
    with forked():
        line.close()
        assert read_to_end(other) == 0


def test_children_do_not_keep_the_connections_to_other_hosts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        link = HostLink(1, socket.create_connection(listening.getsockname()))
        other, _ = listening.accept()
    other.settimeout(10)
    with other, forked():
        link.close()
        assert read_to_end(other) == 0
