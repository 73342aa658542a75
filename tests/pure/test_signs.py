"""Signs of life, and which processes count as ended by them."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fullshard import _torch
from fullshard.comm import pulse
from fullshard.comm.pulse import Sign, silence_s
from fullshard.watch.roll import Roll


@contextmanager
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as found:
        try:
            yield found
        finally:
            found.kill()


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_processes_are_told_apart() -> None:
    with process() as other:
        sign = Sign(pulse._own_host(), other.pid, 0)
        assert not (sign.is_of_the_dead or sign.is_of_the_stopped)
        os.kill(other.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED)
        assert sign.is_of_the_stopped and not sign.is_of_the_dead
    assert sign.is_of_the_dead


def test_a_rank_is_not_dead_because_nothing_can_be_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Sign(pulse._own_host(), os.getpid(), 0)
    monkeypatch.setattr(pulse, "_own_host", lambda: own.host)
    with no_descriptors():
        assert not (own.is_of_the_dead or own.is_of_the_stopped)


@pytest.mark.parametrize(
    ("error", "is_dead"),
    [(errno.ENOENT, True), (errno.ESRCH, True), (errno.EACCES, False), (errno.EIO, False)],
)
def test_only_an_unknown_process_is_dead(
    monkeypatch: pytest.MonkeyPatch, error: int, is_dead: bool
) -> None:
    own = Sign(pulse._own_host(), os.getpid(), 0)
    monkeypatch.setattr(pulse, "_own_host", lambda: own.host)

    def fails(*_: Any) -> str:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Path, "read_text", fails)
    assert own.is_of_the_dead == is_dead


def test_a_process_tells_its_number_in_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a PID namespace without a /proc of its own ``os.getpid`` returns another number."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert pulse._own_number() == int(os.readlink("/proc/self"))
    monkeypatch.setattr(os, "readlink", lambda path: os.stat("/nowhere"))
    assert pulse._own_number() == 1


def test_where_there_is_no_proc_nobody_is_dead() -> None:
    assert not Sign(pulse._UNKNOWN, 1, 0).is_of_the_dead


def test_a_rank_that_runs_may_be_silent_as_long_as_its_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a running rank of this host gets the longer limit: a call may hold its interpreter."""
    monkeypatch.setenv("FULLSHARD_PATIENCE_S", "0.01")
    monkeypatch.setattr(pulse, "PULSE_S", 0.01)
    monkeypatch.setattr("fullshard.watch.roll.PULSE_S", 0.01)
    store = dist.HashStore()
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=40)
    )
    try:
        with process() as other:
            here, elsewhere = pulse._own_host(), "elsewhere"
            store.set("fullshard/pulse/1", f"{here} {other.pid} 7")
            store.set("fullshard/pulse/2", f"{elsewhere} {other.pid} 7")
            roll = Roll(store)
            roll.absences([1, 2])
            time.sleep(2 * silence_s())
            found = roll.absences([1, 2])
            assert not found[1].is_final and "runs, but gives no sign of life" in found[1].why
            assert found[2].is_final
            os.kill(other.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, other.pid, os.WSTOPPED)
            assert roll.absences([1])[1].is_final
            os.kill(other.pid, signal.SIGCONT)
            assert Sign(here, other.pid, 0).silence_s() == 40.0
    finally:
        dist.destroy_process_group()


def connections_to(port: int, *, server: bool) -> list[socket.socket]:
    """Return this process's connections to ``port``; ``server``: its ends of them."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket
            continue
        try:
            address = one.getsockname() if server else one.getpeername()
            is_one = address[1] == port and one.getpeername() is not None
        except (OSError, IndexError):
            is_one = False
        if is_one:
            found.append(one)
        else:
            one.close()
    return found


@contextmanager
def job_of_one() -> Iterator[dist.TCPStore]:
    """A job whose store is another process's, as for most ranks; here it is a separate object."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield server
    finally:
        dist.destroy_process_group()


def reset_connections(port: int, *, server: bool = False) -> None:
    for one in connections_to(port, server=server):
        one.shutdown(socket.SHUT_RDWR)
        one.close()


def test_a_connection_to_the_store_that_breaks_is_made_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with job_of_one() as server:
        own = _torch.own_store()
        own.set("before", "1")
        assert own.add("count", 1) == 1
        reset_connections(server.port)
        with caplog.at_level(logging.WARNING, "fullshard"):
            assert own.get("before") == b"1"
        assert "rank 0 lost its connection to the job's store" in caplog.text
        assert own.add("count", 1) == 2 and own.check(["count"])
        caplog.clear()
        own.set("after", "2")
        assert not caplog.text and _torch.default_store().clone().get("after") == b"2"  # type: ignore[attr-defined]


def test_a_value_that_a_broken_connection_took_is_set_again() -> None:
    """The kernel takes it, and nobody answers."""
    with job_of_one() as server:
        own = _torch.own_store()
        own.set("before", "1")
        reset_connections(server.port, server=True)
        own.set("after", "2")
        assert _torch.default_store().clone().get("after") == b"2"  # type: ignore[attr-defined]


def test_a_rank_goes_on_to_give_signs_after_its_connection_broke(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulse, "PULSE_S", 0.02)
    with job_of_one() as server:
        pulse.begin_pulse()

        def number() -> int:
            sign = pulse.last_sign(_torch.default_store().clone(), 0)  # type: ignore[attr-defined]
            return -1 if sign is None else sign.number

        def comes_to(least: int) -> None:
            until_s = time.monotonic() + 20
            while number() < least:
                assert time.monotonic() < until_s, "no sign of life"
                time.sleep(0.01)

        comes_to(1)
        reset_connections(server.port)
        comes_to(number() + 5)


SERVER = """
import time, torch.distributed as dist
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(server.port, flush=True)
time.sleep(60)
"""


def test_a_store_that_is_gone_is_not_waited_for() -> None:
    """Its server ends with the first rank, and others end later."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            own = _torch.own_store()
            own.set("before", "1")
            server.kill()
            server.wait()
            began_s = time.monotonic()
            with pytest.raises(dist.DistNetworkError):
                for _ in range(3):  # the first may be sent before the connection is known to end
                    own.set("after", "2")
            assert time.monotonic() - began_s < 10
        finally:
            dist.destroy_process_group()
