"""The outside of a sharded module: its class, names and log lines."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import FSDPModule, fully_shard
from tests.ranks.models import heard
from tests.ranks.net import make, optimizer_of, shard, step
from tests.ranks.pool import on_ranks


@on_ranks(2)
def test_a_sharded_module_is_still_what_it_was() -> None:
    linear = nn.Linear
    model = fully_shard(nn.Sequential(fully_shard(linear(4, 4)), linear(4, 4), linear(4, 4)))
    again = fully_shard(linear(2, 2))
    part = model[:2]
    result = [
        isinstance(model, FSDPModule) and isinstance(model, nn.Sequential),
        type(model).__name__ == "FSDPSequential",
        type(model[0]) is type(again) and type(again).__name__ == "FSDPLinear",
        type(model[1]) is linear,
        type(part) is nn.Sequential and part[0] is model[0],
        type(type(again)(3, 3)) is linear,
        [n for n, _ in model.named_parameters()][:2] == ["0.weight", "0.bias"],
        all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in model.parameters()),
    ]
    assert result == [True] * len(result)


@on_ranks(2)
def test_each_unit_logs_one_line() -> None:
    with heard() as lines:
        model = shard(make())
        step(model, optimizer_of(model))
    assert [line.startswith("INFO: ") for line in lines] == [True] * 3
    assert ["Linear" in line for line in lines] == [True, True, False]
    assert "Net" in lines[2] and "5 parameters" in lines[2]
