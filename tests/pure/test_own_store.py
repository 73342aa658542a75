"""The watch's own connection to the store, and its recovery after a failure."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from fullshard.comm import own_store
from fullshard.comm.own_store import OwnStore

HOST = "127.0.0.1"


class Proxy:
    """A port in front of a store; it can drop its connections, and stop accepting new ones."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.listening = socket.create_server((HOST, 0))
        self.port = self.listening.getsockname()[1]
        self.ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self.listening.accept()
            except OSError:
                return
            other = socket.create_connection((HOST, self._to))
            self.ends += one, other
            for source, target in ((one, other), (other, one)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while part := source.recv(1 << 16):
                target.sendall(part)
            target.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        ends, self.ends = self.ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        """Drop all connections and accept no more."""
        with suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        self.drop()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    server = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()
    del server


@pytest.fixture
def store(proxy: Proxy) -> OwnStore:
    """Return a store as in a job, with prefixes; the wrapped store keeps its own connection."""
    timeout = timedelta(minutes=7)
    outer = dist.TCPStore(HOST, proxy.port, is_master=False, timeout=timeout)
    return OwnStore(dist.PrefixStore("job", dist.PrefixStore("group", outer)))


def num_sockets() -> int:
    return sum(is_socket(fd) for fd in os.listdir("/proc/self/fd"))


def is_socket(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False


def test_a_broken_connection_is_made_anew(
    proxy: Proxy, store: OwnStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Every operation succeeds with the old keys, and one message is logged."""
    for number in range(3):
        store.set("a", str(number))
        proxy.drop()
        assert store.get("a") == str(number).encode()
        store._next_s = 0.0
        proxy.drop()
        assert store.check(["a"]) and not store.check(["b"])
        store._next_s = 0.0
        proxy.drop()
        assert store.compare_set("c", "", str(number)) == b"0"
        store._next_s = 0.0
        proxy.drop()
        assert store.add("n", 1) > number
        store._next_s = 0.0
    proxy.drop()
    assert store.delete_key("a")
    assert not store.check(["a"])
    assert store.timeout == timedelta(minutes=7) == store._store.timeout
    (said,) = caplog.messages
    assert said.startswith("the connection to the store") and "lost and made anew" in said


def test_threads_of_one_connection_make_one(proxy: Proxy, store: OwnStore) -> None:
    store.set("a", "1")
    before = num_sockets()
    proxy.drop()
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(store.get("a"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"1"] * 8
    assert num_sockets() <= before


def test_a_connection_that_breaks_at_once_is_left_for_a_while(
    proxy: Proxy, store: OwnStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_store, "_PAUSE_S", 0.2)
    for _ in range(2):  # the second time before the end of the pause
        proxy.drop()
        try:
            store.set("a", "1")
        except dist.DistNetworkError:
            break
    else:
        pytest.fail("the store reconnects without a pause")
    time.sleep(0.3)
    store.set("a", "1")


def test_a_store_that_is_gone_is_said_to_be_at_once(
    proxy: Proxy, store: OwnStore, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end of a job the store's process may end first, so nothing is logged as a warning."""
    store.set("a", "1")
    proxy.close()
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(dist.DistNetworkError):
            store.check(["a"])
    assert time.monotonic() - began < 1.0
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_store_that_is_out_of_reach_is_told_once(
    proxy: Proxy,
    store: OwnStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def unreachable(*_: object) -> socket.socket:
        raise OSError("No route to host")

    monkeypatch.setattr(own_store, "_PAUSE_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_connection", unreachable)
        proxy.drop()
        for _ in range(3):
            with pytest.raises(dist.DistNetworkError):
                store.check(["a"])
    (said,) = caplog.messages
    assert "was lost (the store does not answer: No route to host)" in said
    store.set("a", "1")  # works again once the store can be reached
    assert "lost and made anew" in caplog.messages[1]


def test_a_value_is_awaited_on_another_connection() -> None:
    server = dist.TCPStore(HOST, 0, 1, True)
    own = OwnStore(server)
    with pytest.raises(dist.DistStoreError):
        own.get_within("none", timedelta(milliseconds=50))
    with ThreadPoolExecutor(1) as thread:
        value = thread.submit(own.get_within, "late", timedelta(seconds=30))
        assert not own.check(["late"])  # while the other thread waits
        own.set("late", "here")
        assert value.result() == b"here"


@pytest.mark.parametrize("prefixes", [(), ("job",), ("job", "group")])
def test_a_wait_leaves_the_time_out_of_a_store_without_connections(prefixes: Sequence[str]) -> None:
    """Such a store is the one that the program uses, too."""
    store: dist.Store = dist.HashStore()
    store.set_timeout(timedelta(seconds=77))
    inner = store
    for prefix in prefixes:
        store = dist.PrefixStore(prefix, store)
    store.set("key", "value")
    assert OwnStore(store).get_within("key", timedelta(seconds=5)) == b"value"
    assert inner.timeout == timedelta(seconds=77)  # type: ignore[attr-defined]
