"""Mixed precision: the dtypes of tensors in forward and backward, and training close to fp32."""

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
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from fullshard import MixedPrecisionPolicy, PerParameter, Ragged, fully_shard
from tests.ranks.models import full_parameters, noise
from tests.ranks.net import batch, make, shard
from tests.ranks.pool import on_ranks

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


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
    """A module that records its inputs, and returns one of each structure."""

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


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("policy", "outside"),
    [
        (MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP64), FP64),
        (fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32), FP32),
        (
            SimpleNamespace(
                param_dtype=BF16, reduce_dtype=FP32, output_dtype=None, cast_forward_inputs=True
            ),
            BF16,
        ),
    ],
    ids=["ours", "of torch", "no output dtype"],
)
def test_inputs_are_cast_and_outputs_cast_back(policy: Any, outside: torch.dtype) -> None:
    """Inputs are cast to the compute dtype; outputs stay in it unless there is an output dtype."""
    module = fully_shard(Probe(), mp_policy=policy)
    extra = Ordered(half=torch.ones(6, dtype=torch.float16), whole=torch.arange(6))
    out = module(torch.ones(2, 6), extra=extra)
    seen, got = module.seen, module.seen["extra"]
    assert seen["x"] is seen["weight"] is got["half"].dtype is BF16
    assert seen["count"] is got["whole"].dtype is torch.int64
    assert seen["offset"] is FP32
    assert type(got) is Ordered
    out["tensor"].sum().backward()
    assert module.weight.grad.dtype is FP32 and isinstance(module.weight.grad, DTensor)
    classes = [Tensor, Pair, Ordered, Record, collections.defaultdict, list]
    assert [type(value) for value in out.values()] == classes
    assert out["record"].label == "kept" and out["default"].default_factory is list
    assert out["pair"].right.dtype is torch.int64
    tensors = [out["tensor"], out["pair"].left, out["ordered"]["a"], out["record"].value]
    tensors += [out["default"]["a"], out["list"][0], out["list"][1][0]]
    assert {one.dtype for one in tensors} == {outside}


@on_ranks(2)
def test_units_inside_do_not_inherit_the_policy() -> None:
    """A unit without a policy computes in fp32 inside a unit in bf16."""
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
    """Return the bf16 gradients of all ranks' batches, averaged in ``reduce`` by hand."""
    whole = make(FP32)
    total: dict[str, Tensor] = {}
    for share in data.chunk(world):
        low = copy.deepcopy(whole).to(BF16)
        low(share.to(BF16)).float().square().mean().backward()
        for name, param in low.named_parameters():
            total[name] = total.get(name, 0) + param.grad.to(reduce)
    return {name: (value / world).float() for name, value in total.items()}


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(("reduce", "bound"), [(FP32, 1e-6), (None, 1e-2)], ids=["fp32", "as is"])
def test_gradients_in_low_precision_are_close_and_exact_if_reduced_in_fp32(
    world: int, reduce: torch.dtype | None, bound: float
) -> None:
    rank = dist.get_rank()
    data = noise(4 * world, 6, seed=3, dtype=FP32)
    expected = reference_gradients(data, world, reduce or BF16)
    model = shard(make(FP32), mp_policy=MixedPrecisionPolicy(BF16, reduce))
    model(data.chunk(world)[rank]).float().square().mean().backward()
    assert all(p.dtype is FP32 and p.grad.dtype is FP32 for p in model.parameters())
    for name, param in model.named_parameters():
        apart = (param.grad.full_tensor() - expected[name]).norm() / expected[name].norm()
        assert apart <= bound, name


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("layout", [PerParameter(), Ragged()], ids=repr)
def test_bf16_training_stays_close_to_fp32(layout: Any) -> None:
    """Five steps in bf16 drift from fp32 by at most 5% of the distance that fp32 moves."""
    plain = make(FP32)
    start = full_parameters(plain)
    policy = MixedPrecisionPolicy(BF16, FP32)
    model = shard(copy.deepcopy(plain), mp_policy=policy, layout=layout)
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
