"""Jobs that resume after a fault in the same process: memory and groups are released."""

from __future__ import annotations

import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import Life, fully_shard, resilient
from fullshard._torch import world as _world
from fullshard.errors import LostRankError, PeerError
from fullshard.recover import life
from fullshard.recover.membership import Decision, Membership, Next, Outcome, Vote
from fullshard.recover.resilient import _Job, leave
from tests.ranks.models import Trouble
from tests.ranks.pool import RankPool, on_ranks


@on_ranks(1, process_group=False)
@pytest.mark.parametrize("error", [Trouble, PeerError, None])
def test_transferred_state_that_is_never_loaded_is_removed_from_memory(
    tmp_path: Path, error: type[Exception] | None
) -> None:
    """State that is transferred to a second attempt is deleted if the attempt never loads it."""
    memory = tmp_path / "memory"
    memory.mkdir()
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    meanwhile = []

    def train(life: Life) -> bool:
        if life.number:
            meanwhile.extend(memory.iterdir())
            if error is not None:
                raise error("no")
            return True
        model = fully_shard(nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        life.load([], model, optimizer)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        life.reached(1)
        raise PeerError("rank 1 failed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(life, "_MEMORY", memory)
        try:
            resilient(train, max_restarts=1)
        except (Trouble, PeerError) as raised:
            assert error is not None and isinstance(raised, error)
        else:
            assert error is None
            dist.destroy_process_group()
    assert (len(meanwhile), len([*memory.iterdir()])) == (1, 0)


def models_of_the_attempt_before(path: Path) -> list[bool]:
    """Fail in a hook of a module; return which models are alive in the next attempt."""
    store = dist.FileStore(str(path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    made: list[weakref.ref[nn.Module]] = []

    def fails(*_: object) -> None:
        raise PeerError("rank 1 failed")

    def train(life: Life) -> list[bool]:
        if life.number:
            return [one() is not None for one in made]
        model = fully_shard(nn.Sequential(nn.Linear(4, 4)))
        made.append(weakref.ref(model))
        model.register_forward_pre_hook(fails)
        model(torch.ones(2, 4))
        raise AssertionError

    alive = resilient(train, max_restarts=1)
    dist.destroy_process_group()
    return alive


def test_the_model_of_an_attempt_is_gone_when_the_next_begins(
    pool: RankPool, tmp_path: Path
) -> None:
    """The model is freed, though PyTorch calls hooks in a closure that a traceback keeps alive."""
    found = pool.run(1, models_of_the_attempt_before, tmp_path, process_group=False)
    assert found == [[False]]


def wait_for_who_leaves() -> bool:
    """Let rank 1 leave the job while a variable holds its group; rank 0's collective must fail."""
    held, store = dist.group.WORLD, dist.PrefixStore("leaves", _world.default_store())
    if dist.get_rank() == 1:
        leave(None)
        store.wait(["is awake"])
        return held is not None
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1))
    store.set("is awake", b"")
    dist.destroy_process_group()
    return True


def test_who_leaves_wakes_the_others_even_if_something_holds_its_group(pool: RankPool) -> None:
    assert pool.run(2, wait_for_who_leaves) == [True] * 2


def test_a_store_that_is_gone_is_told_with_what_to_use_instead() -> None:
    """The error recommends no FileStore: a rank killed while it writes would block the others."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    member = Membership(dist.TCPStore("127.0.0.1", kept.port, is_master=False), 0, limit_s=1.0)
    del kept
    with pytest.raises(LostRankError, match=r"does not answer.*TCPStore") as raised:
        member.vote(0, [0, 1], Vote(Outcome.DONE))
    assert "FileStore" not in str(raised.value)
    member.leave("ended", [])


def test_a_lost_rank_is_named_as_in_its_attempt() -> None:
    job: _Job[None] = _Job.__new__(_Job)
    job._attempt, job._transfer, job._max_restarts = Life(0, 3), mock.Mock(), 0
    job._original_ranks = (0, 2, 3)
    with pytest.raises(PeerError, match=r": rank 1 ended$"):
        job._prepare_attempt(Decision(Next.AGAIN, (0, 3), {2: "ended"}, ""), None)
