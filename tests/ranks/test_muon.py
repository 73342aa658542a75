"""Muon on sharded models: PyTorch's Muon and AdamW on the unsharded one."""

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

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import checkpoint
from fullshard.checkpoint import (
    full_optim_state_dict,
    load_full_optim_state_dict,
    load_full_state_dict,
    sharded_optim_state_dict,
)
from fullshard.errors import UnsupportedError
from fullshard.optim import Muon, StepGuard
from tests.kit.muon import ADAMW, EXACT, LR, accumulated, full, gaps, in_fp64, made, sharded
from tests.ranks.models import shard_units
from tests.ranks.muon import BY_MUON, Model, Reference, backward
from tests.ranks.pool import RankError, RankPool, on_ranks

PLACES = [
    (1, "per_parameter"),
    (2, "per_parameter"),
    (3, "per_parameter"),
    (4, "per_parameter"),
    (1, "ragged"),
    (2, "ragged"),
    (3, "ragged"),
    (4, "ragged"),
    (2, "flat"),
    (3, "flat"),
    (4, "hsdp"),
    (4, "hsdp ragged"),
    (4, "tp"),
    (4, "tp ragged"),
]
everywhere = pytest.mark.parametrize(("world", "kind"), PLACES)


def given_equal_gradients(kind: str) -> dict[str, float]:
    model, rank, world = sharded(kind)
    plain = made()
    optimizer, reference = Muon(model, lr=LR, adamw=ADAMW), Reference(plain, LR, ADAMW)
    for number in range(4):
        accumulated(model, number, rank, world)
        grads = full(model, grads=True)
        for name, param in plain.named_parameters():
            param.grad = grads[name]
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    return gaps(model, plain)


@everywhere
def test_it_is_bit_equal_given_equal_gradients(pool: RankPool, world: int, kind: str) -> None:
    """AdamW may round otherwise where a vector ends, see ``test_sharded_optimizer``."""
    for found in pool.run(world, given_equal_gradients, kind):
        assert {name: found[name] for name in BY_MUON} == dict.fromkeys(BY_MUON, 0.0)
        assert max(found.values()) <= 1e-15


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


def trains(kind: str) -> tuple[float, float]:
    """The largest gaps of parameters and of momenta."""
    model, rank, world = sharded(kind)
    optimizer = muon(model)
    trained(model, optimizer, range(4), rank, world)
    plain, reference = unsharded(4)
    state = full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    momenta = []
    names = {id(param): name for name, param in plain.named_parameters()}
    for param, views in reference.views:
        kept = [reference.muon.state[view]["momentum_buffer"] for view in views]
        expected = torch.stack(kept).view(param.shape)
        (key,) = found = state[names[id(param)]]
        assert key == "momentum_buffer"
        momenta.append((found[key] - expected).abs().max().item())
    return max(gaps(model, plain).values()), max(momenta)


@everywhere
def test_training_equals_the_unsharded_run(pool: RankPool, world: int, kind: str) -> None:
    for params, momenta in pool.run(world, trains, kind):
        assert params <= EXACT
        assert momenta <= EXACT


def saves(kind: str, folder: str) -> Any:
    """Trains two steps; returns the full state, too."""
    model, rank, world = sharded(kind)
    optimizer = muon(model)
    trained(model, optimizer, range(2), rank, world)
    checkpoint.save(folder, model, optimizer, step=2)
    return full_optim_state_dict(model, optimizer)


def goes_on(kind: str, folder: str, state: Any) -> float:
    """Loads the checkpoint, and the optimizer from full state if there is any."""
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
    """A step that is skipped, and copies of model and optimizer."""
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
    """A layer that is frozen for a while, and one without gradients in a step."""
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
    """Elements of momenta that this rank has; each is somewhere once."""
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
def test_state_goes_through_pytorchs_state_dicts() -> None:
    """State goes through PyTorch's functions for state dicts, to an optimizer that has stepped."""
    model, rank, world = sharded("per_parameter")
    optimizer, other = muon(model), Muon(model, lr=7.0)
    trained(model, optimizer, range(2), rank, world)
    set_optimizer_state_dict(model, other, get_optimizer_state_dict(model, optimizer))
    trained(model, other, range(2, 4), rank, world)
    assert max(gaps(model, unsharded(4)[0]).values()) <= EXACT


@on_ranks(2)
def test_parameters_may_be_on_meta_at_first() -> None:
    """Built, sharded and given to the optimizer before there is any memory."""
    with torch.device("meta"):
        model: Any = Model(tied=True).double()
    shard_units(model, model.layers)
    optimizer = muon(model)
    model.to_empty(device="cpu")
    load_full_state_dict(model, made().state_dict())
    trained(model, optimizer, range(2), dist.get_rank(), dist.get_world_size())
    assert max(gaps(model, unsharded(2)[0]).values()) <= EXACT


def flat_parameters() -> None:
    Muon(FSDP(made(), use_orig_params=False))


def test_flat_parameters_are_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match="use_orig_params=True"):
        pool.run(2, flat_parameters)
    assert issubclass(UnsupportedError, NotImplementedError)
