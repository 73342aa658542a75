"""Ranks whose optimizers stepped apart all raise the same error, and no rank waits for another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import Ragged, StateDictType, checkpoint, fully_shard
from fullshard.errors import CheckpointError, ConfigError, FullshardError
from fullshard.optim import OwnedOptimizer, ShardedOptimizer
from tests.kit.block_states import EAGER
from tests.ranks.block_states import kind_of, kinds
from tests.ranks.models import fill, refusal
from tests.ranks.pool import RankPool

APART = 1
"""The rank whose steps differ."""

worlds = pytest.mark.parametrize("world", [2, 3])
faces = pytest.mark.parametrize("face", ["per_parameter", "ragged", "flat", "one flat"])


class Raising(AdamW):
    """AdamW that raises on one rank, before its step or after the first parameter's."""

    when = ""

    def step(self, closure: Any = None) -> Any:
        if self.when == "before" and dist.get_rank() == APART:
            raise ValueError("this rank fails")
        if self.when != "within" or dist.get_rank() != APART:
            return super().step(closure)
        (group,) = self.param_groups
        everything, group["params"] = group["params"], group["params"][:1]
        super().step(closure)
        group["params"] = everything
        raise ValueError("this rank fails")


def made(face: str) -> Any:
    model = fill(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double())
    if face.endswith("flat"):
        return FSDP(model, use_orig_params=face == "flat")
    options = {"layout": Ragged()} if face == "ragged" else {}
    fully_shard(model[0], **options)  # type: ignore[index]
    return fully_shard(model, **options)


def made_optimizer(model: nn.Module, which: str) -> Optimizer:
    if which == "itself":
        return Raising(model.parameters())
    return {"sharded": ShardedOptimizer, "owned": OwnedOptimizer}[which](
        model.named_parameters() if which == "owned" else model.parameters(), Raising
    )


def take_steps(model: nn.Module, optimizer: Optimizer, when: str) -> None:
    """Take steps, the last of which raises on one rank; catch the error there."""
    steps = [when] if when == "within" else ["", when] if when == "later" else [when]
    for number, its in enumerate(steps):
        model(torch.ones(2, 6, dtype=torch.float64) + number).square().sum().backward()
        Raising.when = "before" if its == "later" else its
        try:
            optimizer.step()
        except ValueError as error:
            assert str(error) == "this rank fails"
        finally:
            Raising.when = ""
        optimizer.zero_grad()


def refusals(*calls: Callable[[], Any]) -> list[str]:
    said = [refusal(ConfigError, call) for call in calls]
    dist.barrier()  # all ranks have made the calls
    return said


def apart(face: str, which: str, when: str) -> list[str]:
    model = made(face)
    optimizer = made_optimizer(model, which)
    take_steps(model, optimizer, when)
    calls = [
        lambda: checkpoint.full_optim_state_dict(model, optimizer),
        lambda: checkpoint.full_optim_state_dict(model, optimizer, rank0_only=False, cpu=False),
        lambda: checkpoint.sharded_optim_state_dict(model, optimizer, plain_shards=True),
    ]
    said = refusals(*calls)
    checkpoint.full_state_dict(model)  # collectives still match
    assert checkpoint.sharded_optim_state_dict(model, optimizer)["param_groups"]  # is local
    # After a load of another optimizer's state on all ranks, their state is equal again.
    other = made_optimizer(model, which)
    take_steps(model, other, "")
    whole = checkpoint.full_optim_state_dict(model, other, rank0_only=False)
    checkpoint.load_full_optim_state_dict(model, optimizer, whole)
    checkpoint.full_optim_state_dict(model, optimizer)
    return said


@faces
@pytest.mark.parametrize("which", ["itself", "sharded"])
@pytest.mark.parametrize("when", ["before", "later", "within"])
@worlds
def test_state_that_differs_is_told_to_all(
    pool: RankPool, world: int, face: str, which: str, when: str
) -> None:
    """Every rank raises an error that names the differing rank: no step, a step less, or a part."""
    if when == "within" and (which == "sharded" or face == "one flat"):
        pytest.skip("one run, or one parameter a unit, has stepped or has not")
    first, *others = pool.run(world, apart, face, which, when)
    assert all(said == first for said in others)
    for said in first:
        assert said.count("rank 1 ") == 1 and "rank 2" not in said
        words = {"later": "has step of ", "before": "lacks step of ", "within": "lacks step of "}
        assert f"rank {APART} {words[when]}" in said


def apart_in_the_wrapper(when: str) -> list[str]:
    model = made("flat")
    optimizer = made_optimizer(model, "itself")
    take_steps(model, optimizer, when)
    said = []
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FSDP.state_dict_type(model, kind):
            said += refusals(lambda: FSDP.optim_state_dict(model, optimizer))
    return said


@pytest.mark.parametrize("when", ["before", "later"])
def test_wrappers_tell_it_too(pool: RankPool, when: str) -> None:
    first, second = pool.run(2, apart_in_the_wrapper, when)
    assert first == second
    assert all(f"rank {APART} " in said for said in first)


def saves(folder: str, face: str, which: str, when: str) -> str:
    model = made(face)
    optimizer = made_optimizer(model, which)
    take_steps(model, optimizer, when)
    with pytest.raises(FullshardError) as caught:
        checkpoint.save(f"{folder}/one", model, optimizer, step=1)
    assert isinstance(caught.value, (ConfigError, CheckpointError))
    take_steps(model, optimizer, "")  # the process group works as before
    return str(caught.value)


@faces
@pytest.mark.parametrize("which", ["itself", "sharded"])
@pytest.mark.parametrize("when", ["before", "later"])
@worlds
def test_such_state_is_not_saved(
    pool: RankPool, tmp_path: Path, world: int, face: str, which: str, when: str
) -> None:
    first, *others = pool.run(world, saves, str(tmp_path), face, which, when)
    assert all(said == first for said in others)
    words = "the optimizers of ranks differ: step of " if when == "later" else "tensors do not fit"
    assert words in first
    assert list(tmp_path.iterdir()) == []


def edited() -> list[str]:
    """Return the refusal of state that has another dtype on one rank."""
    model = made("per_parameter")
    optimizer = made_optimizer(model, "itself")
    take_steps(model, optimizer, "")
    state = optimizer.state[model[0].weight]
    if dist.get_rank() == APART:
        state["exp_avg"] = state["exp_avg"].float()
    return refusals(lambda: checkpoint.full_optim_state_dict(model, optimizer))


@worlds
def test_state_of_another_dtype_is_told(pool: RankPool, world: int) -> None:
    first, *others = pool.run(world, edited)
    assert all(said == first for said in others)
    assert f"rank {APART} has exp_avg of 0.weight as float32" in first[0]


@EAGER
def quantised_here_only(kind: str) -> list[str]:
    """Step with a class that quantizes local tensors of 4096 elements; the last rank has fewer."""
    cls, kwargs, _ = kind_of(kind)
    model = fully_shard(fill(nn.Linear(128, 32 * dist.get_world_size() - 1, bias=False)))
    optimizer = cls(model.parameters(), **kwargs)
    model(torch.ones(2, 128)).square().sum().backward()
    optimizer.step()
    return refusals(lambda: checkpoint.full_optim_state_dict(model, optimizer))


@kinds("a 4-bit momentum of one's own", "bitsandbytes AdamW8bit")
@worlds
def test_state_that_is_quantised_on_some_ranks_is_told(
    pool: RankPool, kind: str, world: int
) -> None:
    first, *others = pool.run(world, quantised_here_only, kind)
    assert all(said == first for said in others)
    assert f"rank {world - 1} has" in first[0]


def owners_apart() -> list[str]:
    """Fail in the step of one owner; return the names with state, equal on all ranks."""
    model = made("ragged")
    optimizer = made_optimizer(model, "owned")
    take_steps(model, optimizer, "before")
    full = checkpoint.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    owners = {
        name: optimizer.owners_of(param)[0]  # type: ignore[attr-defined]
        for name, param in model.named_parameters()
    }
    assert full.keys() == {name for name, owner in owners.items() if owner != APART}
    return sorted(full)


def test_what_an_owner_failed_to_step_has_no_state(pool: RankPool) -> None:
    first, second = pool.run(2, owners_apart)
    assert first == second != []


def saves_other_options(folder: str, which: str) -> str:
    model = made("per_parameter")
    optimizer = made_optimizer(model, which)
    take_steps(model, optimizer, "")
    for group in optimizer.param_groups:
        group["lr"] = 0.25 if dist.get_rank() == APART else 0.5
    with pytest.raises(ConfigError) as caught:
        checkpoint.save(f"{folder}/one", model, optimizer, step=1)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    checkpoint.save(f"{folder}/two", model, optimizer, step=1)
    checkpoint.load(f"{folder}/two", model, optimizer)
    return str(caught.value)


@pytest.mark.parametrize("which", ["itself", "sharded"])
def test_other_options_are_not_saved(pool: RankPool, tmp_path: Path, which: str) -> None:
    """Such a checkpoint could not be loaded."""
    first, *others = pool.run(3, saves_other_options, str(tmp_path), which)
    assert all(said == first for said in others)
    assert (
        "options of 0.weight: lr=0.5 on rank 0, lr=0.25 on 1" in first and first.count("lr=") == 2
    )
    assert sorted(one.name for one in tmp_path.iterdir()) == ["latest", "two"]
