"""Mixed precision: which dtypes are seen where, and that training stays close to the reference."""

from __future__ import annotations

import collections
import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import MixedPrecisionPolicy, fully_shard
from tests.ranks.models import fill, full_parameters, noise
from tests.ranks.net import batch, make, shard
from tests.ranks.pool import RankPool, on_ranks

worlds = pytest.mark.parametrize("world", [1, 2, 3])
BF16, FP32 = torch.bfloat16, torch.float32


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Record:
    value: Tensor
    label: str


class Ordered(collections.OrderedDict[str, Tensor]):
    pass


class Probe(nn.Module):
    """Notes what it gets, and gives back one of each structure."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("offset", torch.zeros(6))
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor, *, extra: Any = None) -> dict[str, Any]:
        self.seen = {
            "x": x.dtype,
            "weight": self.weight.dtype,
            "count": self.count.dtype,
            "offset": self.offset.dtype,
            "extra": extra,
        }
        y = x * self.weight
        return {
            "tensor": y,
            "pair": Pair(y, y.long()),
            "ordered": Ordered(a=y),
            "record": Record(y, "kept"),
            "default": collections.defaultdict(list, a=y),
            "list": [y, (y, None, 3)],
        }


def probe(policy: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    module = fully_shard(Probe(), mp_policy=policy)
    extra = Ordered(half=torch.ones(6, dtype=torch.float16), whole=torch.arange(6))
    out = module(torch.ones(2, 6), extra=extra)
    seen = dict(module.seen)
    got = seen.pop("extra")
    seen |= {"half": got["half"].dtype, "whole": got["whole"].dtype, "class": type(got).__name__}
    out["tensor"].sum().backward()
    assert module.weight.grad.dtype is FP32 and isinstance(module.weight.grad, DTensor)
    classes = {name: type(value).__name__ for name, value in out.items()}
    dtypes = {
        "tensor": out["tensor"].dtype,
        "pair": (out["pair"].left.dtype, out["pair"].right.dtype),
        "ordered": out["ordered"]["a"].dtype,
        "record": out["record"].value.dtype,
        "default": out["default"]["a"].dtype,
        "list": (out["list"][0].dtype, out["list"][1][0].dtype),
    }
    assert out["record"].label == "kept" and out["default"].default_factory is list
    return seen, {"classes": classes, "dtypes": dtypes}


def check_casts(results: list[Any], inside: torch.dtype, outside: torch.dtype) -> None:
    for seen, out in results:
        assert seen["x"] is seen["weight"] is seen["half"] is inside
        assert seen["count"] is seen["whole"] is torch.int64
        assert seen["offset"] is FP32
        assert seen["class"] == "Ordered"
        names = ["Tensor", "Pair", "Ordered", "Record", "defaultdict", "list"]
        assert list(out["classes"].values()) == names
        dtypes = out["dtypes"]
        assert dtypes["pair"] == (outside, torch.int64) and dtypes["list"] == (outside, outside)
        assert {dtypes[n] for n in ("tensor", "ordered", "record", "default")} == {outside}


@worlds
def test_inputs_are_cast_and_outputs_cast_back(pool: RankPool, world: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float64)
    check_casts(pool.run(world, probe, policy), BF16, torch.float64)


@worlds
def test_without_output_dtype_outputs_stay(pool: RankPool, world: int) -> None:
    policy = SimpleNamespace(
        param_dtype=BF16, reduce_dtype=FP32, output_dtype=None, cast_forward_inputs=True
    )
    check_casts(pool.run(world, probe, policy), BF16, BF16)


def with_torch_policy() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

    return probe(TorchPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32))


def test_the_policy_of_torch_is_accepted(pool: RankPool) -> None:
    check_casts(pool.run(2, with_torch_policy), BF16, FP32)


@on_ranks(2)
def test_inputs_are_left_alone_where_asked() -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
    module = fully_shard(Probe(), mp_policy=policy)
    module(torch.ones(2, 6))
    seen = module.seen
    assert (seen["x"], seen["weight"]) == (FP32, BF16)


@on_ranks(2)
def test_units_inside_do_not_inherit_the_policy() -> None:
    """A child unit without a policy of its own, and a plain child."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    seen: list[torch.dtype] = []
    fully_shard(model[0])
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False))
    for layer, cast in ((model[0], FP32), (model[1], BF16)):
        layer.register_forward_pre_hook(
            lambda m, a, d=cast: (seen.append(m.weight.dtype), a[0].to(d))[1]
        )
    model(torch.ones(2, 6))
    assert seen == [FP32, BF16]


def reference_gradients(data: Tensor, world: int, reduce: torch.dtype) -> dict[str, Tensor]:
    """bf16 gradients of every rank's share, averaged in ``reduce`` by hand."""
    whole = make(FP32)
    total: dict[str, Tensor] = {}
    for share in data.chunk(world):
        low = copy.deepcopy(whole).to(BF16)
        low(share.to(BF16)).float().square().mean().backward()
        for name, param in low.named_parameters():
            total[name] = total.get(name, 0) + param.grad.to(reduce)
    return {name: (value / world).float() for name, value in total.items()}


def gradients(reduce: torch.dtype | None) -> dict[str, float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    data = noise(4 * world, 6, seed=3, dtype=FP32)
    expected = reference_gradients(data, world, reduce or BF16)
    model = shard(make(FP32), mp_policy=MixedPrecisionPolicy(BF16, reduce))
    model(data.chunk(world)[rank]).float().square().mean().backward()
    assert all(p.dtype is FP32 and p.grad.dtype is FP32 for p in model.parameters())
    return {
        name: ((param.grad.full_tensor() - expected[name]).norm() / expected[name].norm()).item()
        for name, param in model.named_parameters()
    }


@worlds
def test_low_precision_gradients_reduced_in_fp32_are_exact(pool: RankPool, world: int) -> None:
    for differences in pool.run(world, gradients, FP32):
        assert max(differences.values()) <= 1e-6


@worlds
def test_low_precision_gradients_reduced_as_they_are_stay_close(pool: RankPool, world: int) -> None:
    for differences in pool.run(world, gradients, None):
        assert max(differences.values()) <= 1e-2


@on_ranks(1, 2, 3)
def test_bf16_training_stays_close_to_fp32() -> None:
    """How far bf16 compute drifts from fp32 in 5 steps, and how far fp32 moved."""
    plain = make(FP32)
    start = full_parameters(plain)
    model = shard(copy.deepcopy(plain), mp_policy=MixedPrecisionPolicy(BF16, FP32))
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for number in range(5):
            one(batch(number, FP32)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    a, b = full_parameters(model), full_parameters(plain)
    apart = max((a[n] - b[n]).abs().max().item() for n in b)
    moved = max((start[n] - b[n]).abs().max().item() for n in b)
    assert apart <= 0.05 * moved


@on_ranks(1, 2, 3)
def test_the_reduction_alone_may_be_wider() -> None:
    """``reduce_dtype`` alone: fp32 model, fp64 reduction."""
    plain = fill(nn.Linear(6, 5))
    model = fully_shard(copy.deepcopy(plain), mp_policy=MixedPrecisionPolicy(None, torch.float64))
    for one in (plain, model):
        one(batch(0, FP32)).square().mean().backward()
    assert model.weight.grad.dtype is FP32
    assert (model.weight.grad.full_tensor() - plain.weight.grad).abs().max().item() <= 1e-7
