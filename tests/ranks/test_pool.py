"""The pool of ranks, on which all other tests on ranks rely."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.ranks.pool import RankError, RankPool, on_ranks


def rank_and_world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def process_id() -> int:
    return os.getpid()


def raise_on(rank: int) -> None:
    """Raise on one rank; the others wait in a collective, as after a real failure."""
    if dist.get_rank() == rank:
        raise ValueError(f"this is rank {rank}'s own mistake")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        wait_for_nothing()
    dist.barrier()


def wait_for_nothing() -> None:
    threading.Event().wait()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSEGV)


def one_collective_too_many(rank: int) -> None:
    if dist.get_rank() == rank:
        dist.all_reduce(torch.zeros(1), async_op=True)


def make_group() -> int:
    dist.new_group([0])
    return dist.get_pg_count()


def count_groups() -> int:
    return dist.get_pg_count()


def make_default_group() -> bool:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.is_initialized()


def has_process_group() -> bool:
    return dist.is_initialized()


def seed_and_change_defaults() -> None:
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)


def seed_and_default_dtype() -> tuple[int, torch.dtype]:
    return torch.initial_seed(), torch.get_default_dtype()


def warn() -> None:
    warnings.warn("something is off", UserWarning, stacklevel=1)


def leave_python() -> None:
    raise SystemExit(3)


def unpicklable_result() -> object:
    return lambda: None


def test_worlds_switch_on_the_same_processes(pool: RankPool) -> None:
    processes = pool.run(4, process_id)
    for world in (2, 3, 4, 2, 2, 4, 1):
        assert pool.run(world, rank_and_world) == [(rank, world) for rank in range(world)]
        assert pool.run(world, process_id) == processes[:world]


def test_a_rank_s_exception_surfaces_with_its_traceback(pool: RankPool) -> None:
    processes = pool.run(3, process_id)
    with pytest.raises(RankError) as caught:
        pool.run(3, raise_on, 1)
    message = str(caught.value)
    assert "ValueError: this is rank 1's own mistake" in message
    assert "in raise_on" in message
    places = [message.index(f"rank {rank} raised") for rank in (1, 0, 2)]
    assert min(places) == places[0], "the cause comes first"
    assert pool.run(3, process_id) == processes, "an exception costs no process"


def test_a_hang_fails_in_time_with_every_stack(pool: RankPool) -> None:
    processes = pool.run(2, process_id)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(2, hang_on, 1, timeout_s=3)
    assert time.monotonic() - start < 10
    message = str(caught.value)
    assert "die_with_parent" not in message, "no stacks of the pool's own threads"
    assert "rank 0 still running after 3.0 s" in message
    assert "in barrier" in message
    assert "rank 1 still running after 3.0 s" in message
    assert "in wait_for_nothing" in message
    assert set(pool.run(2, process_id)).isdisjoint(processes), "the pool was rebuilt"


def test_a_death_fails_with_its_stack(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(2, die_on, 1)
    message = str(caught.value)
    assert f"rank 1 died, exit code -{int(signal.SIGSEGV)}" in message
    assert "in die_on" in message
    assert pool.run(2, rank_and_world) == [(0, 2), (1, 2)]


@on_ranks(2)
def fails_on_ranks() -> None:
    found = {"rank": 3}
    assert found == {}


def test_a_failed_assertion_shows_the_values_of_names(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"found = {'rank': 3}"):
        fails_on_ranks(pool)


def test_ranks_out_of_step_fail_their_own_test(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.ranks.pool.SETTLE_TIMEOUT_S", 1.0)
    with pytest.raises(RankError, match=r"the barrier after .*one_collective_too_many"):
        pool.run(2, one_collective_too_many, 1)
    assert pool.run(2, rank_and_world) == [(0, 2), (1, 2)]


def test_groups_a_job_made_do_not_outlive_it(pool: RankPool) -> None:
    assert max(pool.run(2, make_group)) == 2
    assert pool.run(2, count_groups) == [1, 1]


def test_without_a_process_group(pool: RankPool) -> None:
    assert pool.run(2, has_process_group) == [True, True]
    assert pool.run(2, has_process_group, process_group=False) == [False, False]
    assert pool.run(1, make_default_group, process_group=False) == [True]
    assert pool.run(2, has_process_group, process_group=False) == [False, False]
    assert pool.run(2, has_process_group) == [True, True]


def test_what_a_job_sets_for_its_process_is_undone(pool: RankPool) -> None:
    before = pool.run(2, seed_and_default_dtype)
    pool.run(2, seed_and_change_defaults)
    assert pool.run(2, seed_and_default_dtype) == before


def test_warnings_are_errors_on_ranks_too(pool: RankPool) -> None:
    with pytest.raises(RankError, match="something is off"):
        pool.run(2, warn)


def test_leaving_python_is_a_failure_like_another(pool: RankPool) -> None:
    with pytest.raises(RankError, match="SystemExit: 3"):
        pool.run(2, leave_python)


def test_results_that_cannot_travel_are_named(pool: RankPool) -> None:
    with pytest.raises(RankError, match="unpicklable_result"):
        pool.run(2, unpicklable_result)


def test_refusals_before_anything_starts() -> None:
    with RankPool() as pool:
        with pytest.raises(TypeError, match="top of a module"):
            pool.run(2, lambda: None)
        with pytest.raises(ValueError, match="1 to 8 ranks"):
            pool.run(9, rank_and_world)
