"""Asynchronous saves: the saved state is that of the call, whatever changes afterwards."""

from __future__ import annotations

import copy
import errno
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fullshard import checkpoint, unshard_params
from fullshard.checkpoint.saving import write as writing
from fullshard.checkpoint.saving.pending import await_save
from fullshard.device import host_tensor
from fullshard.errors import (
    CheckpointError,
    ConfigError,
    LostRankError,
    ProtocolError,
    UnsupportedError,
)
from fullshard.frontend import contexts
from fullshard.optim import ShardedOptimizer
from tests.kit.checkpoint_async import begins, disk, slow_disk, steps_wait, trains
from tests.kit.checkpoint_files import WAYS, alone, built, everything, plain, same
from tests.ranks.models import refusal
from tests.ranks.pool import RankPool, on_ranks

PATIENCE_S = 240.0  # a busy machine is slow
LITTLE = 100_000  # bytes, less than one weight of the model has


def trained(way: str) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = built(way, 1)
    trains(model, optimizer, 0)
    return model, optimizer


def goes_on_training(way: str, path: Path, budgets: list[int | None]) -> None:
    model, optimizer = trained(way)
    for number, budget in enumerate(budgets):
        extra = {"rates": [1, 0.5]}
        before = copy.deepcopy(everything(model, optimizer))
        folder = path / str(number)
        save = checkpoint.save(
            folder, model, optimizer, extra, step=3, mode="async", budget_nbytes=budget
        )
        extra["rates"].append(2)
        for seed in (3, 5):  # the first step waits for the copies; buffers change in the forward
            trains(model, optimizer, seed)
        save.wait()
        assert save.is_done and save.path == folder
        if budget is not None:
            assert save._writing._memory.peak_nbytes <= budget
        other, its_optimizer = built(way, 2)
        assert checkpoint.load(folder, other, its_optimizer) == {"rates": [1, 0.5]}
        assert same(everything(other, its_optimizer), before)
        checkpoint.verify(folder)
        dist.barrier()


@pytest.mark.parametrize(("world", "way"), [*((2, way) for way in WAYS), (4, "ragged tp")])
def test_what_is_saved_is_the_state_at_the_call(
    pool: RankPool, tmp_path: Path, world: int, way: str
) -> None:
    budgets = [None, 0, LITTLE] if world == 2 else [LITTLE]
    pool.run(world, goes_on_training, way, tmp_path, budgets, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("kind", ["lists", "fused", "sharded"])
def test_a_step_waits_until_everything_is_copied_and_no_longer(
    pool: RankPool, tmp_path: Path, kind: str
) -> None:
    for budget in (None, 0, LITTLE):
        path = tmp_path / str(budget)
        waits = pool.run(2, steps_wait, path, kind, budget, timeout_s=PATIENCE_S)
        assert waits == [budget is not None] * 2


@on_ranks(2, timeout_s=PATIENCE_S)
def test_loads_and_loans_wait_for_copies(tmp_path: Path) -> None:
    """Writes to parameters or state, by fullshard or PyTorch, wait for the copies."""
    model, optimizer = built("rows", 1)
    other, its_optimizer = built("rows", 2)
    for one, its in ((model, optimizer), (other, its_optimizer)):
        trains(one, its, 0)
    before = everything(model, optimizer)
    state, steps = other.state_dict(), its_optimizer.state_dict()
    shards = checkpoint.sharded_state_dict(other)

    def lends() -> None:
        with unshard_params(model):
            model.blocks[0].up.weight.data.zero_()

    calls: list[Callable[[], object]] = [
        lambda: model.load_state_dict(state),
        lambda: checkpoint.load_sharded_state_dict(model, shards),
        lambda: model.blocks[1].load_state_dict(other.blocks[1].state_dict()),
        lambda: optimizer.load_state_dict(steps),
        lends,
    ]
    for number, call in enumerate(calls):
        with slow_disk() as goes_on:
            folder = tmp_path / str(number)
            checkpoint.save(folder, model, optimizer, step=1, mode="async", budget_nbytes=0)
            writer = begins(call)
            assert writer.is_alive(), number
            goes_on.set()
            writer.join()
        assert not any(unit.readers for unit in contexts.units_at_rest(model, "look"))
        assert not optimizer._optimizer_step_pre_hooks
        checkpoint.load(folder, model, optimizer)
        assert same(everything(model, optimizer), before)


def writes_by_hand(path: Path) -> list[str]:
    model, optimizer = trained("rows")
    said = []
    with slow_disk() as goes_on:
        checkpoint.save(path / "0", model, optimizer, step=1, mode="async", budget_nbytes=0)
        with torch.no_grad():
            model.blocks[0].up.weight.zero_()
        goes_on.set()
        said.append(refusal(ProtocolError, checkpoint.save, path / "1", model, optimizer, step=1))
    with slow_disk():
        save = checkpoint.save(path / "2", model, optimizer, step=1, mode="async")
        save.wait_until_copied()
        with torch.no_grad():
            model.blocks[0].up.weight.add_(1)
    dist.barrier()
    said += [one.path.name for one in checkpoint.list_checkpoints(path)]
    return said


def test_what_is_written_by_hand_meanwhile_is_noticed(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(2, writes_by_hand, tmp_path, timeout_s=PATIENCE_S)
    assert first == second
    assert "blocks.0.up.weight was written to while it was being saved" in first[0]
    assert "wait_until_copied()" in first[0] and first[1:] == ["2"]


@on_ranks(2, timeout_s=PATIENCE_S)
@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_state_that_is_written_by_hand_is_noticed(tmp_path: Path, kind: str) -> None:
    model, optimizer = built("ragged", 1)
    if kind == "sharded":
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    trains(model, optimizer, 0)
    with slow_disk() as goes_on:
        checkpoint.save(tmp_path / kind, model, optimizer, step=1, mode="async", budget_nbytes=0)
        with torch.no_grad():
            optimizer.state[model.blocks[0].up.weight]["exp_avg"].zero_()
        goes_on.set()
        with pytest.raises(ProtocolError) as found:
            await_save()
    said = str(found.value)
    assert "the state of the optimizer was written to" in said


def one_disk_is_full(path: Path) -> list[str]:
    model, optimizer = trained("ragged")
    said = []

    def fails(_name: str) -> None:
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    calls: list[Callable[[checkpoint.PendingSave], object]] = [
        lambda save: save.wait(),
        lambda _: checkpoint.save(path / "next", model, optimizer, step=2),
        lambda _: checkpoint.load(path / "bad", model, optimizer),
        lambda _: checkpoint.load_weights(model, path),
    ]
    for call in calls:
        with disk(fails):
            save = checkpoint.save(path / "bad", model, optimizer, step=1, mode="async")
            trains(model, optimizer, 1)
            with pytest.raises(CheckpointError) as found:
                call(save)
        said.append(str(found.value))
        save.wait()  # the failure is reported once
        dist.barrier()
        assert not list(path.glob("*"))
    checkpoint.save(path / "good", model, optimizer, step=1, mode="async").wait()
    checkpoint.verify(path / "good")
    return said


def test_a_failure_is_raised_once_on_all_ranks_by_the_next_call(
    pool: RankPool, tmp_path: Path
) -> None:
    first, second = pool.run(2, one_disk_is_full, tmp_path, timeout_s=PATIENCE_S)
    assert first == second and len(set(first)) == 1
    assert f"save to {tmp_path / 'bad'}: rank 1: OSError: [Errno 28] No space left" in first[0]


def without_a_rank(path: Path) -> str:
    """Block rank 1's writes while the others wait for it; return their error."""
    model, optimizer = trained("rows")
    goes_on = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fullshard.comm.consensus.Consensus.limit_s", 2.0)
        with disk(lambda _: dist.get_rank() == 1 and goes_on.wait(300)):
            save = checkpoint.save(path / "bad", model, optimizer, step=1, mode="async")
            trains(model, optimizer, 1)
            said = ""
            if dist.get_rank() != 1:
                said = refusal(LostRankError, save.wait)
            dist.barrier()
            goes_on.set()
            if dist.get_rank() == 1:
                with pytest.raises(LostRankError):
                    save.wait()
    dist.barrier()
    assert not list(path.glob("*"))
    return said


def test_a_rank_whose_disk_hangs_is_named(pool: RankPool, tmp_path: Path) -> None:
    first, absent, last = pool.run(3, without_a_rank, tmp_path, timeout_s=PATIENCE_S)
    assert first == last and absent == ""
    assert "rank 1 is alive but did not take part within 2 s" in first


def disagrees(path: Path) -> str:
    model, optimizer = built("rows", 1)
    mode = "async" if dist.get_rank() else "sync"
    return refusal(ConfigError, checkpoint.save, path / "one", model, optimizer, step=1, mode=mode)


def test_ranks_that_disagree_are_refused(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(2, disagrees, tmp_path, timeout_s=PATIENCE_S)
    assert first == second and "mode of rank 1 differs from rank 0's" in first


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "later"}, 'mode=\'later\': expected "sync" or "async"'),
        ({"mode": "async", "budget_nbytes": -1}, "budget_nbytes=-1: expected a number of bytes"),
        ({"mode": "async", "budget_nbytes": 1.5}, "budget_nbytes=1.5: expected"),
        ({"budget_nbytes": 5}, 'budget_nbytes=5: only for mode="async"'),
    ],
)
def test_arguments_without_a_meaning_are_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", ".")):
        checkpoint.save(tmp_path / "one", *alone(), step=1, **options)
    with pytest.raises(ConfigError, match=said.replace("(", ".")):
        checkpoint.Checkpointer(tmp_path, **options)
    assert not list(tmp_path.iterdir())


@on_ranks(2, timeout_s=PATIENCE_S)
def test_a_checkpointer_saves_and_removes_beside_the_training(tmp_path: Path) -> None:
    model, optimizer = built("ragged", 1)
    checkpointer = checkpoint.Checkpointer(tmp_path, every=2, keep=2, mode="async", budget_nbytes=0)
    states = {}
    for step in range(1, 10):
        trains(model, optimizer, step)
        if checkpointer.is_due(step):
            states[step] = copy.deepcopy(everything(model, optimizer))
            checkpointer.save(model, optimizer, {"step": step}, step=step)
    found = checkpointer.load(model, optimizer)  # waits for the last save
    assert found is not None and found.extra == {"step": 8}
    assert same(everything(model, optimizer), states[8])
    checkpointer.wait()
    dist.barrier()
    assert [one.step for one in checkpoint.list_checkpoints(tmp_path)] == [6, 8]


@pytest.mark.parametrize("budget", [None, 0, LITTLE])
def test_a_checkpointer_keeps_the_memory_of_copies(tmp_path: Path, budget: int | None) -> None:
    model, optimizer = trained("plain")
    checkpointer = checkpoint.Checkpointer(tmp_path, mode="async", budget_nbytes=budget)
    memory = checkpointer._how.memory
    made: list[int] = []
    first = 0

    def counted(nbytes: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
        made.append(nbytes)
        return host_tensor(nbytes, dtype, pinned=pinned)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "host_tensor", counted)
        for step in range(3):
            before = copy.deepcopy(everything(model, optimizer))
            checkpointer.save(model, optimizer, step=step).wait()
            trains(model, optimizer, step)
            first = len(made) if step == 0 else first
        checkpoint.load(checkpointer.path(2), model, optimizer)
    assert same(everything(model, optimizer), before)
    if budget is None:
        assert first and len(made) == first
        assert memory.peak_nbytes == sum(made)
    else:
        assert memory.peak_nbytes <= budget and bool(made) == bool(budget)
    assert memory.has_room(memory.peak_nbytes)


def test_a_save_that_fails_gives_the_memory_of_its_copies_back(tmp_path: Path) -> None:
    model, optimizer = trained("plain")
    checkpointer = checkpoint.Checkpointer(tmp_path, mode="async", budget_nbytes=1 << 20)

    def full(_: str) -> None:
        raise OSError(errno.ENOSPC, "full")

    with disk(full):
        save = checkpointer.save(model, optimizer, step=1)
        with pytest.raises(CheckpointError, match="full"):
            save.wait()
    assert checkpointer._how.memory.has_room(1 << 20)
    checkpointer.save(model, optimizer, step=1).wait()
    checkpoint.verify(checkpointer.path(1))


def test_without_an_optimizer_everything_is_copied_when_save_returns(tmp_path: Path) -> None:
    model = plain(1)
    with slow_disk():
        save = checkpoint.save(tmp_path / "one", model, step=1, mode="async")
        before = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
    save.wait()
    checkpoint.load(tmp_path / "one", model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_model_and_its_optimizer_are_copied_meanwhile_and_pickled_later(tmp_path: Path) -> None:
    model, optimizer = trained("plain")
    with slow_disk():
        checkpoint.save(tmp_path / "one", model, optimizer, step=1, mode="async", budget_nbytes=0)
        other, its_optimizer = copy.deepcopy((model, optimizer))
        trains(other, its_optimizer, 1)  # the copy has no hooks and waits for nothing
    for one in (model, other):
        loaded = pickle.loads(pickle.dumps(one))
        loaded.load_state_dict(one.state_dict())  # waits for nothing


class Wrapped(torch.optim.Optimizer):
    """A wrapper of an optimizer, without state and hooks of its own, as accelerate's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer_step_pre_hooks":
            raise AttributeError(name)
        return getattr(self.__dict__["inner"], name)


def test_an_optimizer_without_hooks_is_refused_and_nothing_waits(tmp_path: Path) -> None:
    model = plain(1)
    inner = torch.optim.AdamW(model.parameters())
    with pytest.raises(UnsupportedError, match="Wrapped takes no hooks"):
        checkpoint.save(tmp_path / "one", model, Wrapped(inner), step=1, mode="async")
    assert not list(tmp_path.iterdir())
    model.load_state_dict(model.state_dict())
    trains(model, inner, 1)


def test_without_a_thread_it_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = alone()

    def cannot(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot)
    save = checkpoint.save(tmp_path / "one", model, optimizer, step=1, mode="async")
    assert save.is_done
    checkpoint.verify(tmp_path / "one")
    optimizer.step()


def test_nothing_is_kept_when_a_save_has_ended(tmp_path: Path) -> None:
    model, optimizer = alone()
    param = weakref.ref(next(model.parameters()))
    moment = weakref.ref(next(iter(optimizer.state.values()))["exp_avg"])
    save = checkpoint.save(tmp_path / "one", model, optimizer, step=1, mode="async")
    save.wait()
    del model, optimizer
    gc.collect()
    assert param() is None and moment() is None and save.is_done


def test_a_load_into_a_plain_model_waits(tmp_path: Path) -> None:
    model, optimizer = trained("plain")
    before = copy.deepcopy(model.state_dict())
    with slow_disk() as goes_on:
        checkpoint.save(tmp_path / "one", model, optimizer, step=1, mode="async", budget_nbytes=0)
        load = begins(lambda: model.load_state_dict(plain(2).state_dict()))
        assert load.is_alive()
        goes_on.set()
        load.join()
    checkpoint.load(tmp_path / "one", model)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


PROGRAM = """
import sys, torch
from pathlib import Path
from fullshard import checkpoint
model = torch.nn.Linear(512, 512)
checkpoint.save(sys.argv[1], model, step=1, mode="async")
"""


WITH_EXECUTOR = """
import time
from concurrent.futures import ThreadPoolExecutor
from fullshard.checkpoint.format import DataWriter
put, executor = DataWriter.put, ThreadPoolExecutor(1)
def slow(*args):
    time.sleep(0.5)  # the program ends meanwhile
    executor.submit(put, *args).result()
DataWriter.put = slow
"""


@pytest.mark.parametrize("first", ["", WITH_EXECUTOR], ids=["alone", "executor"])
def test_a_program_that_ends_waits_for_its_save(tmp_path: Path, first: str) -> None:
    """Clients of object stores use executors, which CPython ends before it joins threads."""
    target = tmp_path / "one"
    command = [sys.executable, "-c", first + PROGRAM, str(target)]
    subprocess.run(command, check=True, timeout=120)
    checkpoint.verify(target)


def test_a_wait_that_is_interrupted_does_not_forget_the_save(tmp_path: Path) -> None:
    """Otherwise two saves would run at once, and the error of the first would be lost."""
    model, optimizer = trained("plain")
    with slow_disk() as goes_on:
        save = checkpoint.save(
            tmp_path / "one", model, optimizer, step=1, mode="async", budget_nbytes=0
        )
        interrupted = mock.patch.object(threading.Thread, "join", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            await_save()
        again = begins(await_save)
        assert again.is_alive()
        goes_on.set()
        again.join()
    assert save.is_done
