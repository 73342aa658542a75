"""Models, batches and training steps to compare with the unsharded model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from tests.ranks.models import GPT, OddModel, fill, full_parameters, ids, shard_units

STEPS = 5


def make(kind: str, dtype: torch.dtype) -> nn.Module:
    model = GPT() if kind == "gpt" else OddModel()
    return fill(model.to(dtype))


def vocab(kind: str) -> int:
    return 53 if kind == "gpt" else 13


def shard(
    model: nn.Module, reshard: bool | int | None, fully_shard: Any = fullshard.fully_shard
) -> None:
    inner = model.blocks if isinstance(model, GPT) else [model.first, model.back]
    shard_units(model, inner, by=fully_shard, reshard_after_forward=reshard)


def batches(kind: str, world: int, accumulate: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the microbatches of all ranks: [step][microbatch] -> tokens, targets."""
    size = (2 * world, 7)
    return [
        [
            (ids(*size, vocab=vocab(kind), seed=s), ids(*size, vocab=vocab(kind), seed=s + 1))
            for s in (100 * step + 10 * micro for micro in range(accumulate))
        ]
        for step in range(STEPS)
    ]


def train(
    model: nn.Module,
    steps: list[list[tuple[Tensor, Tensor]]],
    rank: int,
    world: int,
    sync_always: bool = False,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train on a part of each batch; return losses of the full batch, and full parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for microbatches in steps:
        total = torch.zeros((), dtype=torch.float64)
        for number, (tokens, targets) in enumerate(microbatches):
            if isinstance(model, fullshard.FSDPModule) and not sync_always:
                model.set_requires_gradient_sync(number == len(microbatches) - 1)
            mine = slice(rank * len(tokens) // world, (rank + 1) * len(tokens) // world)
            loss = GPT.loss(model(tokens[mine]), targets[mine]) / len(microbatches)
            loss.backward()
            total += loss.detach()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world)
        optimizer.step()
        optimizer.zero_grad()
    return losses, full_parameters(model)


def use_checkpoints(model: nn.Module, reentrant: bool) -> None:
    if isinstance(model, GPT):
        model.run_block = lambda block, x: checkpoint(block, x, use_reentrant=reentrant)


def compare(
    kind: str,
    dtype: torch.dtype,
    reshard: bool | int | None,
    *,
    accumulate: int = 1,
    sync_always: bool = False,
    reentrant: bool | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the largest differences of losses and parameters on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    steps = batches(kind, world, accumulate)
    plain = make(kind, dtype)
    expected, expected_params = train(plain, steps, 0, 1)
    model = make(kind, dtype)
    shard(model, reshard, partial(fullshard.fully_shard, **options))
    if reentrant is not None:
        use_checkpoints(model, reentrant)
    losses, params = train(model, steps, rank, world, sync_always)
    return {
        "loss": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "param": max((params[n] - expected_params[n]).abs().max().item() for n in params),
        "fell": losses[-1] < losses[0],
    }


def check(results: list[dict[str, Any]], loss: float, param: float) -> None:
    for result in results:
        assert result["fell"]
        assert result["loss"] <= loss
        assert result["param"] <= param
