"""An exception that leaves an optimizer step and is caught: all ranks raise, and a load repairs."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import checkpoint, fully_shard
from fullshard.comm.fault_domain import fault_domain
from fullshard.engine import steps
from fullshard.errors import FullshardError, TornStepError
from tests.kit.torn_steps import adamw, batch, compute, equals, fail, muon, owned, sharded, trained
from tests.kit.watch import tower, wait_for_the_end_of
from tests.ranks.autograd import engine_of
from tests.ranks.models import Trouble, full_parameters
from tests.ranks.pool import RankPool, on_ranks

Make = Callable[[Any], torch.optim.Optimizer]


EXCHANGE = (owned, muon)
"""Optimizers whose steps exchange data, so that other ranks would notice in the same step."""


def half_stepped(
    path: Path, face: str, make: Make, wire: str, victims: list[int], late: int | None = None
) -> list[str]:
    """Leave step 2 by an exception that ``victims`` catch; continue from a checkpoint.

    Rank ``late`` begins step 3 once the other ranks have dropped it.

    Returns:
        The errors raised on this rank in steps 2 to 4.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_SHARED_MEMORY", wire)
        patch.setenv("FULLSHARD_PATIENCE_S", "3")
        dist.barrier()
        model: Any = tower(face, "rows")
        optimizer = make(model)
        trained(model, optimizer, (0, 1))
        checkpoint.save(path, model, optimizer, step=1)
        said = []
        for number in (2, 3, 4):
            if number == 3 and dist.get_rank() == late:
                wait_for_the_end_of(fault_domain().era)
            try:
                compute(model, optimizer, number)
                if number == 2 and dist.get_rank() in victims:
                    fail(optimizer, after=make in EXCHANGE)
                else:
                    optimizer.step()
            except (FullshardError, Trouble) as error:
                said.append(f"{number} {type(error).__name__}: {error}")
        checkpoint.load(path, model, optimizer)
        trained(model, optimizer, (5,))
        found = full_parameters(model)
        patch.setenv("FULLSHARD_SHARED_MEMORY", "1")
        model = tower(face, "rows")
        optimizer = make(model)
        trained(model, optimizer, (0, 1, 5))
        equals(found, full_parameters(model))
        return said


KINDS = [
    (2, "fully_shard", adamw, "1", [1]),
    (4, "fully_shard", adamw, "0", [2]),
    (2, "fully_shard", sharded, "0", [1]),
    (4, "fully_shard", owned, "1", [1, 2]),
    (2, "fully_shard", muon, "1", [0]),
    (2, "flat", adamw, "1", [1]),
    (4, "flat", sharded, "0", [3]),
    (2, "fully_shard", adamw, "1", [0, 1]),
    (4, "fully_shard", adamw, "1", [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("world", "face", "make", "wire", "victims"), KINDS)
def test_a_step_of_an_optimizer_left_by_an_exception_is_told_once_on_all(
    pool: RankPool,
    tmp_path: Path,
    world: int,
    face: str,
    make: Make,
    wire: str,
    victims: list[int],
) -> None:
    told = pool.run(world, half_stepped, tmp_path / "step-000001", face, make, wire, victims)
    for rank, said in enumerate(told):
        assert said[: rank in victims] == ["2 Trouble: out of memory, say"] * (rank in victims)
        (one,) = said[rank in victims :]  # step 4 runs on all ranks
        assert one.startswith("3 TornStepError: rank "), said
        assert one.endswith(
            "so the weights there are half-stepped. Load a checkpoint on all ranks"
        ), one
        named = [r for r in range(world) if f"rank {r} failed: an exception, in the step of" in one]
        # A victim that has not begun its next step when the first error is raised may not be named.
        assert named and set(named) <= set(victims), one
    assert len({said[-1] for said in told}) == 1


def test_who_was_left_too_and_comes_late_is_told_what_the_others_were(
    pool: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "step-000001"
    told = pool.run(3, half_stepped, path, "fully_shard", adamw, "1", [0, 1, 2], late=1)
    for said in told:
        assert len(said) == 2, said
        assert said[1].startswith("3 TornStepError: rank "), said
        assert said[1] == told[0][1]


@on_ranks(2)
@pytest.mark.parametrize("way", ["load", "load_state_dict"])
def test_weights_that_were_loaded_again_are_whole(tmp_path: Path, way: str) -> None:
    """No rank raises if all ranks catch the exception and load at once."""
    path = tmp_path / "step-000001"
    model: Any = tower("fully_shard", "rows")
    optimizer = adamw(model)
    trained(model, optimizer, (0, 1))
    checkpoint.save(path, model, optimizer, step=1)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    compute(model, optimizer, 2)
    with pytest.raises(Trouble):
        fail(optimizer, after=True)
    if way == "load":
        checkpoint.load(path, model, optimizer)
    else:
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
    trained(model, optimizer, (3,))
    found = full_parameters(model)
    model = tower("fully_shard", "rows")
    optimizer = adamw(model)
    trained(model, optimizer, (0, 1, 3))
    equals(found, full_parameters(model))


def saved(path: Path, victims: list[int]) -> str:
    """Save after a step that an exception has left on ``victims``; return the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_PATIENCE_S", "3")
        model: Any = tower("fully_shard", "rows")
        optimizer = adamw(model)
        compute(model, optimizer, 0)
        if dist.get_rank() in victims:
            with pytest.raises(Trouble):
                fail(optimizer, after=True)
        else:
            optimizer.step()
        with pytest.raises(FullshardError) as caught:
            checkpoint.save(path, model, optimizer, step=0)
        assert isinstance(caught.value, TornStepError), caught.value
        with pytest.raises(TornStepError, match="in the step of AdamW"):
            compute(model, optimizer, 1)
        trained(model, optimizer, (2,))
        return str(caught.value)


@pytest.mark.parametrize("victims", [[1], [0, 1, 2]])
def test_weights_stepped_in_part_are_not_saved(
    pool: RankPool, tmp_path: Path, victims: list[int]
) -> None:
    (said,) = set(pool.run(3, saved, tmp_path / "step-000000", victims))
    assert "caught in the step of AdamW: the weights are half-stepped" in said
    assert not (tmp_path / "step-000000").exists()


@on_ranks(2)
def test_closures_skipped_steps_and_optimizers_of_others_are_not_told_of() -> None:
    """Closures, skipped steps and optimizers of other models are not reported as torn steps."""
    model: Any = tower("fully_shard", "rows")
    optimizer = adamw(model)
    other = nn.Linear(2, 2, dtype=torch.float64)
    foreign = torch.optim.AdamW(other.parameters(), lr=0.1)
    other(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    if dist.get_rank() == 1:
        with pytest.raises(Trouble):
            fail(foreign, after=False)
    trained(model, optimizer, (0,))
    assert not steps._begun  # entries of finished steps are dropped

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch(1)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    many = torch.optim.SGD(model.parameters(), lr=0.01)
    many.step(closure)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in (2, 3):
        optimizer.zero_grad()
        loss = model(batch(number)).square().sum() * (float("inf") if number == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0  # the first step was skipped
    trained(model, optimizer, (4,))
    assert not steps._begun


@on_ranks(2)
def test_the_closure_of_lbfgs_is_inside_of_its_step() -> None:
    """A closure may run the model several times in one step."""
    model: Any = nn.Linear(4, 4, bias=False, dtype=torch.float64)
    fully_shard(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x = torch.ones(2, 4, dtype=torch.float64)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss: Tensor = (model(x) - 1).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert calls > 2
    assert not steps._begun


@on_ranks(2)
def test_an_optimizer_that_was_left_is_not_kept() -> None:
    """fullshard keeps no reference to an optimizer whose step an exception left."""
    model: Any = tower("fully_shard", "rows")
    optimizer = adamw(model)
    compute(model, optimizer, 0)
    with pytest.raises(Trouble):
        fail(optimizer, after=True)
    del optimizer
    gc.collect()
    assert not steps._begun
    trained(model, adamw(model), (1,))


@on_ranks(1)
def test_who_is_alone_knows_what_it_caught() -> None:
    """With one rank, weights cannot differ and no error is raised."""
    model: Any = tower("fully_shard", "rows")
    optimizer = adamw(model)
    compute(model, optimizer, 0)
    with pytest.raises(Trouble):
        fail(optimizer, after=True)
    trained(model, optimizer, (1,))
    assert engine_of(model).steps.step.half_step is None


def tried_again() -> list[str]:
    """Step again on rank 1 after a torn step, which steps weights twice; return the errors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_PATIENCE_S", "3")
        model: Any = tower("fully_shard", "rows")
        optimizer = adamw(model)
        compute(model, optimizer, 0)
        if dist.get_rank() == 1:
            with pytest.raises(Trouble):
                fail(optimizer, after=True)
        optimizer.step()
        said = []
        for number in (1, 2):
            try:
                compute(model, optimizer, number)
            except TornStepError as error:
                said.append(f"{number} {error}")
        return said


def test_a_step_tried_again_is_told(pool: RankPool) -> None:
    told = pool.run(2, tried_again)
    assert told[0] == told[1]
    assert len(told[0]) == 1 and told[0][0].startswith("1 rank 1 failed: an exception"), told
