"""Sharded training equals training the unsharded model on the concatenated batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.kit.parity import batches, check, compare, make, shard, train
from tests.ranks.pool import RankPool, every_world

Shard = Callable[[nn.Module], object]


@every_world
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("kind", ["gpt", "odd"])
def test_equals_the_unsharded_model(
    pool: RankPool, world: int, kind: str, reshard: bool | None
) -> None:
    check(pool.run(world, compare, kind, torch.float64, reshard), 1e-12, 1e-12)


@every_world
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
def test_equals_it_with_activation_checkpoints(
    pool: RankPool, world: int, reshard: bool, reentrant: bool
) -> None:
    results = pool.run(world, compare, "gpt", torch.float64, reshard, reentrant=reentrant)
    check(results, 1e-12, 1e-12)


@every_world
@pytest.mark.parametrize("sync_always", [True, False])
@pytest.mark.parametrize("kind", ["gpt", "odd"])
def test_equals_it_with_gradient_accumulation(
    pool: RankPool, world: int, kind: str, sync_always: bool
) -> None:
    results = pool.run(
        world, compare, kind, torch.float64, True, accumulate=3, sync_always=sync_always
    )
    check(results, 1e-12, 1e-12)


@every_world
def test_equals_it_in_fp32(pool: RankPool, world: int) -> None:
    check(pool.run(world, compare, "gpt", torch.float32, True), 1e-5, 1e-3)


def beside_torch(kind: str, reshard: bool | None) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    rank, world = dist.get_rank(), dist.get_world_size()
    steps = batches(kind, world, 1)
    ours, theirs = make(kind, torch.float64), make(kind, torch.float64)
    shard(ours, reshard)
    shard(theirs, reshard, torch_fully_shard)
    losses, params = train(ours, steps, rank, world)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # view outputs
        other_losses, other_params = train(theirs, steps, rank, world)
    return {
        "loss": max(abs(a - b) for a, b in zip(losses, other_losses, strict=True)),
        "param": max((params[n] - other_params[n]).abs().max().item() for n in params),
        "fell": losses[-1] < losses[0],
    }


@every_world
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", ["gpt", "odd"])
def test_equals_torch_fully_shard(pool: RankPool, world: int, kind: str, reshard: bool) -> None:
    check(pool.run(world, beside_torch, kind, reshard), 1e-12, 1e-12)
