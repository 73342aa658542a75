"""Muon on sharded models equals PyTorch's Muon and AdamW on the unsharded one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fullshard import checkpoint
from fullshard.checkpoint import (
    full_optim_state_dict,
    full_state_dict,
    load_full_optim_state_dict,
    load_full_state_dict,
    sharded_optim_state_dict,
)
from fullshard.optim import Muon, StepGuard
from tests.kit.muon import ADAMW, EXACT, LR, accumulated, full, gaps, in_fp64, made, sharded
from tests.ranks.models import shard_units
from tests.ranks.muon import BY_MUON, Model, Reference, backward
from tests.ranks.pool import RankPool, on_ranks


def unsharded(num_steps: int) -> tuple[nn.Module, Reference]:
    plain = made()
    reference = Reference(plain, LR, ADAMW)
    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", in_fp64):
        for number in range(num_steps):
            accumulated(plain, number)
            reference.step()
            plain.zero_grad()
    return plain, reference


def trained(model: Any, optimizer: Muon, steps: range, rank: int, world: int) -> None:
    for number in steps:
        accumulated(model, number, rank, world)
        optimizer.step()
        optimizer.zero_grad()


def muon(model: nn.Module) -> Muon:
    return Muon(model, lr=LR, adamw=ADAMW, ns_dtype=torch.float64)


def saves(kind: str, folder: str) -> Any:
    """Train two steps and save; return the full optimizer state too."""
    model, rank, world = sharded(kind)
    optimizer = muon(model)
    trained(model, optimizer, range(2), rank, world)
    checkpoint.save(folder, model, optimizer, step=2)
    return full_optim_state_dict(model, optimizer)


def goes_on(kind: str, folder: str, state: Any) -> float:
    """Load the checkpoint, and the optimizer from ``state`` if given; train on."""
    model, rank, world = sharded(kind)
    optimizer = Muon(model, lr=7.0)
    checkpoint.load(folder, model, optimizer)
    if state is not None:
        optimizer = Muon(model, lr=7.0)
        load_full_optim_state_dict(model, optimizer, state)
    trained(model, optimizer, range(2, 4), rank, world)
    return max(gaps(model, unsharded(4)[0]).values())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "per_parameter"), (3, "ragged")),
        ((3, "ragged"), (4, "hsdp")),
        ((4, "tp"), (2, "flat")),
        ((3, "flat"), (1, "per_parameter")),
        ((4, "hsdp ragged"), (4, "tp")),
    ],
    ids=str,
)
def test_it_goes_on_in_another_world(
    pool: RankPool, before: tuple[int, str], after: tuple[int, str], tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    state = pool.run(before[0], saves, before[1], folder)[0]
    assert max(pool.run(after[0], goes_on, after[1], folder, None)) <= EXACT
    assert max(pool.run(after[0], goes_on, after[1], folder, state)) <= EXACT


@on_ranks(2)
def test_guards_and_copies() -> None:
    """A guarded step is skipped, and copies of model and optimizer train on alike."""
    model, rank, world = sharded("per_parameter")
    optimizer = muon(model)
    trained(model, optimizer, range(1), rank, world)
    copied, its = copy.deepcopy((model, optimizer))
    before = full(model)
    guard = StepGuard(model, optimizer, max_norm=0.1)
    backward(model, 0, rank, world)
    skipped = guard.step(float("nan") if rank == 1 else 1.0)
    after = full(model)
    is_same = all(torch.equal(before[name], after[name]) for name in before)
    trained(model, optimizer, range(1, 3), rank, world)
    trained(copied, its, range(1, 3), rank, world)
    plain, _ = unsharded(3)
    gap, copied = max(gaps(model, plain).values()), max(gaps(copied, plain).values())
    assert not skipped and is_same
    assert gap <= EXACT
    assert copied <= EXACT


@on_ranks(3)
def test_frozen_and_absent_gradients() -> None:
    """A layer may be frozen for a step, and another may lack gradients in a step."""
    models = [sharded("ragged")[0], made()]
    model, plain = models
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizers: list[Any] = [muon(model), Reference(plain, LR, ADAMW)]
    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", in_fp64):
        for number in range(4):
            for one, optimizer in zip(models, optimizers, strict=True):
                one.layers[0].requires_grad_(number != 1)
                accumulated(one, number, *((rank, world) if one is model else ()))
                if number == 2:
                    one.layers[2].up.grad = None
                optimizer.step()
                one.zero_grad()
    assert max(gaps(model, plain).values()) <= EXACT


def state_is_placed_at_owners() -> list[int]:
    """Return the numbers of momentum elements on this rank."""
    model, rank, world = sharded("per_parameter")
    optimizer = muon(model)
    trained(model, optimizer, range(1), rank, world)
    state = sharded_optim_state_dict(model, optimizer)["state"]
    return [state[name]["momentum_buffer"].to_local().numel() for name in sorted(BY_MUON)]


def test_each_momentum_is_at_its_owner_only(pool: RankPool) -> None:
    found = pool.run(2, state_is_placed_at_owners)
    sizes = {name: p.numel() for name, p in made().named_parameters() if name in BY_MUON}
    both = [sum(pair) for pair in zip(*found, strict=True)]
    assert both == [sizes[name] for name in sorted(BY_MUON)]


@on_ranks(2)
def test_state_goes_through_pytorchs_state_dicts_to_a_model_made_on_meta() -> None:
    """Optimizer state goes to an optimizer that was made while the model was on meta."""
    model, rank, world = sharded("per_parameter")
    optimizer = muon(model)
    trained(model, optimizer, range(2), rank, world)
    with torch.device("meta"):
        other: Any = Model(tied=True).double()
    shard_units(other, other.layers)
    its = Muon(other, lr=7.0)
    other.to_empty(device="cpu")
    load_full_state_dict(other, full_state_dict(model, rank0_only=False))
    set_optimizer_state_dict(other, its, get_optimizer_state_dict(model, optimizer))
    trained(other, its, range(2, 4), rank, world)
    assert max(gaps(other, unsharded(4)[0]).values()) <= EXACT
