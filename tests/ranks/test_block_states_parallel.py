"""Block-quantised state under tensor parallelism equals the unsharded model's bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fullshard import Ragged, checkpoint
from fullshard.comm.shared import Shared
from tests.kit.block_states import EAGER, owned, same_state
from tests.kit.owned import give, named, same_params
from tests.ranks.block_states import kind_of, kinds
from tests.ranks.models import fill, noise, shard_units
from tests.ranks.pool import RankPool

LAYOUTS = ("per_parameter", "ragged", "blocks")
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


class Mlp(nn.Module):
    """An MLP sharded over tensor-parallel ranks, except for ``plain``."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64)
        self.plain = nn.Linear(64, 72, bias=False)
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x + self.down(torch.tanh(self.up(x))))


def sharded(layout: str, block: int) -> Any:
    model = Mlp()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    found = {"ragged": {"layout": Ragged()}, "blocks": {"layout": Ragged(block)}}
    options = found.get(layout, {})
    return shard_units(model, (model.up, model.down), mesh=mesh["dp"], **options)


def grads_of(step: int) -> dict[str, Tensor]:
    named_params = enumerate(Mlp().named_parameters())
    return {
        name: noise(*param.shape, seed=10 * step + number, dtype=torch.float32)
        for number, (name, param) in named_params
    }


def step_both(models: tuple[Any, Any], optimizers: tuple[Any, Any], steps: range) -> None:
    for step in steps:
        for model, optimizer in zip(models, optimizers, strict=True):
            give(model, grads_of(step))
            optimizer.step()
        same_params(models[1], models[0])


@EAGER
def steps_alike(kind: str, layout: str, folder: str) -> tuple[int, dict[str, int]]:
    """Return the bytes that this rank sent in three steps, and the number of owners by name."""
    cls, kwargs, block = kind_of(kind)
    net, model = Mlp(), sharded(layout, block)
    reference, optimizer = cls(net.parameters(), **kwargs), owned(model, kind)
    sent, exchange = [], Shared.all_to_all

    def count(way: Shared, group: Any, into: Tensor, given: Tensor, *more: Any) -> Any:
        sent.append(given.nbytes)
        return exchange(way, group, into, given, *more)

    with mock.patch.object(Shared, "all_to_all", count):
        step_both((net, model), (reference, optimizer), range(3))
    same_state(model, optimizer, net, reference)
    for name in ("up", "down", "plain"):
        state = optimizer.state[model.get_parameter(f"{name}.weight")]
        assert any("codes" in key or "map" in key for key in state)
    checkpoint.save(f"{folder}/one", model, optimizer, step=3)
    other = sharded("ragged" if layout == "per_parameter" else "per_parameter", block)
    its = owned(other, kind)
    checkpoint.load(f"{folder}/one", other, its)
    step_both((net, other), (reference, its), range(3, 5))
    same_state(other, its, net, reference)
    return sum(sent), {name: len(optimizer.owners_of(param)) for name, param in named(model)}


@every_layout
@kinds("torchao AdamWFp8", "torchao AdamW4bit")
def test_steps_like_the_class_itself(
    pool: RankPool, tmp_path: Path, kind: str, layout: str
) -> None:
    """Tensor-parallel parameters have one owner, the others one on each data-parallel rank."""
    found = pool.run(4, steps_alike, kind, layout, str(tmp_path))
    assert sum(sent for sent, _ in found) > 0
    for _, pieces in found:
        assert pieces["up.weight"] == pieces["down.weight"] == 1
        assert pieces["plain.weight"] == 2
