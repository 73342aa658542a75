"""Rounds through a real store; ranks are threads with connections of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from fullshard.comm import consensus, store_round
from fullshard.comm.consensus import Consensus
from fullshard.comm.liveness import DEAD
from fullshard.comm.own_store import OwnStore
from fullshard.comm.store_round import StoreRound
from fullshard.errors import LostRankError, TornStepError

WORLD = 6


@pytest.fixture(scope="module")
def server() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("127.0.0.1", 0, 1, True)


def all_ranks(server: dist.TCPStore, run: Callable[[int, OwnStore], Any]) -> list[Any]:
    stores = [OwnStore(server) for _ in range(WORLD)]
    with ThreadPoolExecutor(WORLD) as threads:
        return list(threads.map(run, range(WORLD), stores))


def never(*_: Any) -> tuple[()]:
    return ()


def waiting() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "fullshard round"]


def test_one_decides_by_what_all_have_published(server: dist.TCPStore) -> None:
    def rank_of(rank: int, store: OwnStore) -> str:
        now = StoreRound(store, "all")
        time.sleep(0.02 * (WORLD - rank))
        now.publish(rank, f"text {rank}")
        if rank:
            return now.decision(never)
        return now.decide_once(" ".join(now.collect(range(WORLD), never).values()))

    said = " ".join(f"text {rank}" for rank in range(WORLD))
    assert all_ranks(server, rank_of) == [said] * WORLD
    assert not waiting()


def test_the_first_decision_is_that_of_all(server: dist.TCPStore) -> None:
    barrier = threading.Barrier(WORLD)

    def rank_of(rank: int, store: OwnStore) -> str:
        barrier.wait()
        return StoreRound(store, "first").decide_once(f"of {rank}")

    found = {*all_ranks(server, rank_of)}
    assert len(found) == 1
    assert found.pop() == StoreRound(server, "first").decision(never)


@pytest.mark.parametrize("length", [0, 1, 9, 10, 11, 20, 35])
def test_long_texts_go_in_pieces_and_leave_nothing(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(store_round, "_PIECE_NBYTES", 10)
    before, text = server.num_keys(), "abcdefg\n,"[:length].ljust(length, "x")
    now = StoreRound(server, f"long {length}")
    for rank in range(2):
        now.publish(rank, text)
    assert now.decide_once(text) == text
    assert now.collect([1, 0], never) == {1: text, 0: text}
    assert now.decision(never) == text
    now.forget(range(3), decision=True)
    assert not now.is_decided
    assert server.num_keys() == before


def test_a_rank_does_not_read_back_the_long_text_that_it_wrote(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_round, "_PIECE_NBYTES", 10)
    monkeypatch.setattr(store_round, "multi_get", None)
    before, now = server.num_keys(), StoreRound(server, "written")
    now.publish(0, "a" * 25)
    assert now.decide_once("b" * 35) == "b" * 35
    now.forget([0], decision=True)
    assert server.num_keys() == before


def test_a_long_decision_that_comes_second_does_not_mix_with_the_first(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_round, "_PIECE_NBYTES", 10)
    first, second = ("a" * 25, "b" * 35)
    assert StoreRound(server, "two").decide_once(first) == first
    assert StoreRound(server, "two").decide_once(second) == first


def test_ranks_that_are_given_up_are_left_out(server: dist.TCPStore) -> None:
    now = StoreRound(OwnStore(server), "given up")
    now.publish(0, "here")
    looks = []

    def look(missing: Callable[[], list[int]]) -> list[int]:
        looks.append(missing())
        return [] if len(looks) < 3 else [1, 7]

    def late() -> None:
        while len(looks) < 4:
            time.sleep(0.01)
        StoreRound(server, "given up").publish(2, "late")

    thread = threading.Thread(target=late)
    thread.start()
    assert now.collect(range(3), look) == {0: "here", 2: "late"}
    assert looks[0] == [1, 2] and looks[3] == [2]
    assert now.published(range(3)) == {0: "here", 2: "late"}
    thread.join()


def test_a_look_ends_a_wait_at_once_and_its_thread_later(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_round, "_BLOCK_S", 0.5)
    store, before = OwnStore(server), {*waiting()}

    def look(*_: Any) -> list[int]:
        raise LostRankError("rank 1 is gone")

    for wait in (lambda now: now.collect([1], look), lambda now: now.decision(look)):
        began_s = time.monotonic()
        with pytest.raises(LostRankError, match="rank 1 is gone"):
            wait(StoreRound(store, "looked"))
        assert time.monotonic() - began_s < 0.4
        store.set("others", "go on")  # the blocked request uses another connection
    for thread in {*waiting()} - before:
        thread.join(10)
        assert not thread.is_alive()
    assert len(store._waiters) <= 2  # later waits reuse them


def test_a_store_that_goes_away_ends_a_wait() -> None:
    server: dist.TCPStore | None = dist.TCPStore("127.0.0.1", 0, 1, True)
    now = StoreRound(OwnStore(server), "gone")  # type: ignore[arg-type]

    def look(*_: Any) -> list[int]:
        nonlocal server
        server = None
        return []

    with pytest.raises(dist.DistNetworkError):
        now.decision(look)


def test_a_process_that_can_start_no_thread_asks_the_store(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = StoreRound(OwnStore(server), "no threads")
    looks = []

    def look(*_: Any) -> list[int]:
        looks.append(len(looks))
        if len(looks) == 2:
            now.publish(1, "late")
        return []

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert now.collect([1], look) == {1: "late"}
    assert looks == [0, 1]


class Counting(OwnStore):
    """A store connection that counts its requests."""

    num_asked = 0

    def _done(self, work: Any) -> Any:
        type(self).num_asked += 1
        return super()._done(work)


def test_a_round_takes_few_requests_and_none_again_and_again(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fullshard.comm.own_store.OwnStore", Counting)
    monkeypatch.setattr(Counting, "num_asked", 0)
    stores = [Counting(server) for _ in range(WORLD)]

    def rank_of(rank: int, store: OwnStore) -> str:
        now = StoreRound(store, "counted")
        if rank == 3:
            time.sleep(1)  # the other ranks wait meanwhile
        now.publish(rank, "text")
        if rank:
            return now.decision(never)
        now.collect(range(WORLD), never)
        return now.decide_once("decided")

    with ThreadPoolExecutor(WORLD) as threads:
        assert set(threads.map(rank_of, range(WORLD), stores)) == {"decided"}
    assert Counting.num_asked <= 4 * WORLD + 1


@pytest.mark.parametrize(("world", "missing"), [(1024, 0), (1024, 1), (1000, 3), (9, 9), (1, 1)])
def test_few_requests_find_the_few_that_are_missing(world: int, missing: int) -> None:
    store = dist.HashStore()
    asked = mock.Mock(wraps=store)
    now = StoreRound(asked, "many")
    lost = set(range(5, 5 + 337 * missing, 337)) if missing < world else set(range(world))
    for rank in set(range(world)) - lost:
        now.publish(rank, f"{rank}")
    assert now.published(range(world)) == {r: f"{r}" for r in range(world) if r not in lost}
    checks = asked.check.call_count
    assert checks <= 1 + 8 * 4 * len(lost), "one check, and 8 on each of 4 levels per missing rank"


@pytest.mark.parametrize("has_decided", [True, False])
def test_a_first_rank_that_decides_and_then_ends_is_not_lost(
    has_decided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may do both between two requests of a rank that looks for its process."""
    members = consensus._Members(None, "save")
    members.rank, members.world = 1, 2
    monkeypatch.setattr(consensus, "_members", lambda _: members)
    monkeypatch.setattr(consensus.Liveness, "lost", lambda *_: {0: DEAD})
    one = Consensus("save", "save", "a checkpoint")
    if has_decided:
        one._look_for_life(lambda: [])
        return
    with pytest.raises(LostRankError, match="rank 0 ended"):
        one._look_for_life(lambda: [0])


def first_of_two(monkeypatch: pytest.MonkeyPatch) -> Consensus:
    members = consensus._Members(None, "save")
    members.world = 2
    monkeypatch.setattr(consensus, "_members", lambda _: members)
    monkeypatch.setattr(consensus.Liveness, "lost", lambda *_: {})
    return Consensus("save", "save", "a checkpoint")


def test_a_decision_stays_for_a_rank_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be slow, and read the decision before when the first rank no longer waits for it."""
    one = first_of_two(monkeypatch)
    rounds = [one._round(number) for number in range(1, 5)]
    for each in rounds[:2]:
        each.publish(1, '{"value": 1}')
        assert one.agree(lambda: 0, max) == 1
    assert not rounds[0].is_decided and rounds[1].is_decided
    monkeypatch.setattr(Consensus, "limit_s", 0.1)
    with pytest.raises(LostRankError, match="rank 1 is alive but"):
        one.agree(lambda: 0, max)
    assert rounds[1].is_decided


def test_a_decision_stays_for_a_rank_that_a_fault_keeps_from_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(_: Consensus) -> None:
        raise TornStepError("rank 1 left the step of AdamW")

    one = first_of_two(monkeypatch)
    before = one._round(1)
    before.publish(1, '{"value": 1}')
    assert one.agree(lambda: 0, max) == 1
    monkeypatch.setattr(Consensus, "_check", check)
    with pytest.raises(TornStepError):
        one.agree(lambda: 0, max)
    assert before.is_decided
