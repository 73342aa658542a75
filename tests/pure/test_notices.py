"""Notices that cannot be sent: both ends learn it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from fullshard.comm import neighbours
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
