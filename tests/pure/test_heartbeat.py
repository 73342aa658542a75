"""Heartbeats of real processes, and the state of silent ones as the kernel reports it."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from fullshard.comm import heartbeat
from fullshard.comm.heartbeat import Beat, Heartbeat, clamped, last_beat, stall_s
from fullshard.comm.liveness import DEAD, STOPPED, Liveness

SIGN = """
import time, torch.distributed as dist
from fullshard.comm.heartbeat import Heartbeat, last_beat
store = dist.HashStore()
beats = Heartbeat(store, 0)
while last_beat(store, 0) is None:
    time.sleep(0.01)
print(*last_beat(store, 0), flush=True)
input()
"""


Other = tuple[subprocess.Popen[bytes], Beat]
"""Another process, and its heartbeat."""


@pytest.fixture
def other() -> Iterator[Other]:
    with subprocess.Popen(["sleep", "60"]) as process:
        _, _, began = heartbeat._process(str(process.pid))
        yield process, Beat(heartbeat._own_host(), process.pid, began, 1)
        process.kill()


def seen(sign: Beat) -> tuple[bool, bool, bool]:
    return sign.is_running, sign.is_stopped, sign.has_ended


def until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_the_host_knows_who_lives(other: Other) -> None:
    process, sign = other
    assert seen(sign) == (True, False, False)
    process.send_signal(signal.SIGSTOP)
    until(lambda: seen(sign) == (False, True, False))
    process.kill()
    until(lambda: seen(sign) == (False, False, True))  # a zombie
    process.wait()
    assert seen(sign) == (False, False, True)
    assert seen(sign._replace(host="elsewhere")) == (False, False, False)


def test_another_process_with_its_number_says_nothing_of_it() -> None:
    store = dist.HashStore()
    beats = Heartbeat(store, 0)
    until(lambda: last_beat(store, 0) is not None)
    beats.end()
    sign = last_beat(store, 0)
    assert sign is not None and seen(sign) == (True, False, False)
    assert seen(sign._replace(began="1")) == (False, False, False)


def test_a_name_that_is_cut_inside_a_letter_ends_no_signs(other: Other) -> None:
    def named(name: bytes) -> None:
        Path(f"/proc/{os.getpid()}/comm").write_bytes(name)

    name = Path(f"/proc/{os.getpid()}/comm").read_bytes()
    named("entraînement-à-é".encode()[:15])
    try:
        with pytest.raises(UnicodeDecodeError):
            Path("/proc/self/stat").read_text()
        assert heartbeat._process("self")[::2] == heartbeat._process(str(os.getpid()))[::2]
    finally:
        named(name)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM])
def test_a_process_that_cannot_be_looked_at_is_not_dead(
    other: Other, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    sign, read = other[1], Path.read_text

    def refused(path: Path, *args: Any, **options: Any) -> str:
        if path.name == "stat":
            raise OSError(code, os.strerror(code))  # Python picks the subclass for the code
        return read(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", refused)
    assert seen(sign) == (False, False, False)


def test_no_file_descriptor_is_left(other: Other) -> None:
    sign = other[1]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/dev/null", os.O_RDONLY)
        found = seen(sign)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == (False, False, False)


def test_a_namespace_without_its_own_proc() -> None:
    """In such a namespace ``os.getpid`` is 1 or 2, numbers of other processes in ``/proc``."""
    tried = subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"NOT TESTED: no namespace of processes: {tried.stderr.strip()}")
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", SIGN]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        _, pid, *_ = process.stdout.readline().split()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.communicate("\n")
    assert [pid] == children


def test_without_proc_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path, *_: Any, **__: Any) -> str:
        raise FileNotFoundError(errno.ENOENT, str(path))

    monkeypatch.setattr(Path, "read_text", missing)
    store = dist.HashStore()
    beats = Heartbeat(store, 0)
    until(lambda: last_beat(store, 0) is not None)
    beats.end()
    sign = last_beat(store, 0)
    assert sign is not None and seen(sign) == (False, False, False)


def test_a_process_that_lives_is_never_lost_for_its_silence(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process sends no heartbeat while C code holds the GIL."""
    process, sign = other
    monkeypatch.setenv("FULLSHARD_PATIENCE_S", "0.01")
    monkeypatch.setattr("fullshard.comm.liveness.BEAT_S", 0.1)
    store = dist.HashStore()
    store.set("fullshard/heartbeat/1", " ".join(map(str, sign)))
    liveness = Liveness(store)

    def no_report() -> tuple[str, bool]:
        liveness.no_reports([1])
        time.sleep(0.1)
        return liveness.no_reports([1])[1][:2]

    assert no_report() == ("has no heartbeat, though its process is alive", False)
    process.send_signal(signal.SIGSTOP)
    until(lambda: sign.is_stopped)
    assert no_report() == (f"{STOPPED}; silent for 0 s", True)
    process.kill()
    until(lambda: sign.has_ended)
    assert no_report() == (DEAD, True)


class Counting:
    """A store that counts the requests that reads make."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self.store, name)


def test_looks_at_a_process_of_this_host_ask_the_store_once(other: Other) -> None:
    process, sign = other
    counting = Counting()
    counting.store.set("fullshard/heartbeat/1", " ".join(map(str, sign)))
    liveness = Liveness(cast(dist.Store, counting))
    for _ in range(100):
        assert not liveness.lost([1])
    process.kill()
    until(lambda: bool(liveness.lost([1])))
    assert liveness.lost([1]) == {1: DEAD}
    assert counting.requests == 2


def test_looks_at_other_hosts_ask_the_store_once_a_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FULLSHARD_PATIENCE_S", "0.2")  # lost after 1.2 s of silence
    counting = Counting()
    liveness = Liveness(cast(dist.Store, counting))
    began_s = time.monotonic()
    for number in range(5):  # signs of life that the looks find
        counting.store.set("fullshard/heartbeat/1", f"elsewhere 1 1 {number}")
        while time.monotonic() < began_s + 0.3 * (number + 1):
            assert not liveness.lost([1])
    until(lambda: bool(liveness.lost([1])))
    taken_s = time.monotonic() - began_s
    assert taken_s >= 1.2 + 1.2
    assert counting.requests <= 2 * (1 + taken_s / 0.2)


def test_a_store_that_fails_for_a_while_does_not_end_the_signs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing:
        num_failures = 2

        def __init__(self) -> None:
            self.inner = dist.HashStore()

        def set(self, key: str, value: str) -> None:
            self.num_failures -= 1
            if self.num_failures >= 0:
                raise dist.DistNetworkError("broken pipe")
            self.inner.set(key, value)

    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    store: Any = Failing()
    beats = Heartbeat(store, 0)
    until(lambda: last_beat(store.inner, 0) is not None)
    beats.end()


@pytest.mark.parametrize("patience", ["1e12", "inf"])
def test_a_patience_without_end_is_a_time_out_that_sockets_take(
    monkeypatch: pytest.MonkeyPatch, patience: str
) -> None:
    monkeypatch.setenv("FULLSHARD_PATIENCE_S", patience)
    with socket.socket() as one:
        with pytest.raises(OverflowError):
            one.settimeout(float(patience))
        one.settimeout(stall_s())
    assert timedelta(seconds=stall_s()) < timedelta(days=25)
    assert clamped(30) == 30
