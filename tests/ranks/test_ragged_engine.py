"""The engine on the ragged layout: shards cut anywhere, gathered in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import (
    FSDPModule,
    MixedPrecisionPolicy,
    ParamSpec,
    Ragged,
    RaggedTensor,
)
from fullshard.device import BufferKind
from fullshard.frontend.ownership import unit_of
from fullshard.schedule import AfterForward
from tests.kit.parity import batches, check, make
from tests.kit.parity import compare as compare_parity
from tests.ranks.models import GPT, shard_units
from tests.ranks.pool import RankPool, every_world, on_ranks

AFTER = {AfterForward.AUTO: None, AfterForward.RESHARD: True, AfterForward.KEEP: False}


def shard_flat(model: nn.Module, after: AfterForward, policy: MixedPrecisionPolicy) -> None:
    inner = model.blocks if isinstance(model, GPT) else [model.first, model.back]
    shard_units(
        model,
        inner,
        reshard_after_forward=AFTER[after],
        mp_policy=policy,
        layout=Ragged(),
    )


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def train(model: nn.Module, steps: Any, rank: int, world: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for ((tokens, targets),) in steps:
        mine = slice(rank * len(tokens) // world, (rank + 1) * len(tokens) // world)
        GPT.loss(model(tokens[mine]), targets[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("kind", ["gpt", "odd"])
def test_a_flat_layout_trains_as_exactly_and_copies_nothing_when_gathering(
    world: int, kind: str, after: AfterForward
) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    steps = batches(kind, world, 1)
    plain, model = make(kind, torch.float64), make(kind, torch.float64)
    shard_flat(model, after, MixedPrecisionPolicy())
    train(plain, steps, 0, 1)
    train(model, steps, rank, world)
    unit = unit_of(model)
    assert unit is not None and unit.engine is not None
    staged = unit.engine.meter.peak_nbytes[BufferKind.GATHER_OUTPUT]
    flat = all(isinstance(p, RaggedTensor) for p in model.parameters())
    want = dict(plain.named_parameters())
    got = whole_parameters(model)
    difference = max((got[n] - want[n]).abs().max().item() for n in got)
    assert difference <= 1e-12
    assert staged == 0
    assert flat


def mixture(spec: ParamSpec) -> str | int:
    """A granularity of every kind."""
    return ("row", "tensor", "element", 7)[spec.numel % 4]


GRANULARITIES = {"row": "row", "blocks": 5, "tensor": "tensor", "mixture": mixture}
each_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)


@every_world
@each_granularity
@pytest.mark.parametrize("kind", ["gpt", "odd"])
def test_every_granularity_trains_as_the_unsharded_model(
    pool: RankPool, world: int, kind: str, granularity: str
) -> None:
    layout = Ragged(GRANULARITIES[granularity])
    check(pool.run(world, compare_parity, kind, torch.float64, None, layout=layout), 1e-12, 1e-12)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("sync_always", [True, False])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_it_accumulates_as_the_unsharded_model(
    pool: RankPool, world: int, granularity: str, sync_always: bool
) -> None:
    options = {"accumulate": 3, "sync_always": sync_always, "layout": Ragged(granularity)}
    check(pool.run(world, compare_parity, "odd", torch.float64, True, **options), 1e-12, 1e-12)


@on_ranks(2)
def test_a_flat_layout_computes_in_low_precision() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    steps = batches("gpt", world, 1)
    plain, model = make("gpt", torch.float32), make("gpt", torch.float32)
    shard_flat(model, AfterForward.AUTO, MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    train(plain, steps, 0, 1)
    train(model, steps, rank, world)
    assert all(p.dtype is torch.float32 for p in model.parameters())
    got = whole_parameters(model)
    assert all(p.dtype is torch.bfloat16 for p in got.values())
    assert max((got[n] - p).abs().max().item() for n, p in plain.named_parameters()) < 2e-2
