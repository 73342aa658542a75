"""``MixedPrecisionPolicy(param_dtype_override_fn=...)``: parameters that keep their dtype."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import MixedPrecisionPolicy, Ragged, fully_shard
from fullshard.errors import ArgumentTypeError, ConfigError
from tests.ranks.models import fill, noise
from tests.ranks.pool import RankPool, on_ranks
from tests.versions import TORCH

layouts = pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
BF16, FP32 = torch.bfloat16, torch.float32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight  # tied
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: p.dtype for name, p in self.named_parameters()} | {"x": x.dtype}
        x = torch.tanh(self.first(x))
        x = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        return self.last(x)


def norms_stay(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if getattr(param, "stays", False) else None


def make() -> Net:
    model = fill(Net())
    for param in model.norm.parameters():
        param.stays = True
    return model


def train(model: Any, steps: int = 2) -> list[Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for number in range(steps):
        x = noise(4 * world, 6, seed=number, dtype=FP32).chunk(world)[rank]
        loss = model(x).float().square().mean()
        loss.backward()
        grads = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
        results += [loss.detach(), *grads]
        optimizer.step()
        optimizer.zero_grad()
    return results


@on_ranks(2)
@layouts
def test_chosen_parameters_stay_in_their_dtype(layout: str) -> None:
    policy = MixedPrecisionPolicy(BF16, FP32, param_dtype_override_fn=norms_stay)
    chosen = Ragged() if layout == "ragged" else fullshard.PerParameter()
    model = fully_shard(make(), mp_policy=policy, layout=chosen)
    again = copy.deepcopy(model)
    results = train(model)
    assert all(map(torch.equal, results, train(again)))
    assert {p.dtype for p in model.parameters()} == {FP32, torch.int64}
    both = [model.seen, again.seen]
    for seen in both:
        assert seen.pop("count") is torch.int64
        assert {name for name, dtype in seen.items() if dtype is FP32} == {
            "norm.weight",
            "norm.bias",
        }
        assert seen["x"] is BF16


def asked_once(whole: bool) -> int:
    asked: list[nn.Parameter] = []

    def stay(param: nn.Parameter) -> torch.dtype | None:
        asked.append(param)
        return norms_stay(param) or (BF16 if param.dim() == 2 else None)

    model = make()
    params = list(model.parameters())
    policy = MixedPrecisionPolicy(BF16, FP32, param_dtype_override_fn=stay)
    if whole:
        fully_shard(model, mp_policy=policy)
    else:
        model.count = None  # blocks are chosen without it here
        params.pop(0)
        fullshard.shard_blocks(model, mp_policy=policy)
    assert sorted(map(id, asked)) == sorted(map(id, params))
    train(model)
    return len(asked)


def test_it_is_asked_once_for_each_parameter(pool: RankPool) -> None:
    assert pool.run(2, asked_once, True) == [6, 6]
    assert pool.run(2, asked_once, False) == [5, 5]


@on_ranks(2)
def test_other_dtypes_are_refused_before_anything_is_changed() -> None:
    model = make()
    before = type(model), dict(model.named_parameters())
    for answer in (torch.float16, torch.float64, "bf16"):
        policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda _, a=answer: a)
        with pytest.raises(ConfigError, match="for parameter count;") as caught:
            fully_shard(model, mp_policy=policy)
        assert isinstance(caught.value, ValueError) and repr(answer) in str(caught.value)
    with pytest.raises(ArgumentTypeError, match="param_dtype_override_fn=3"):
        fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, param_dtype_override_fn=3))
    with pytest.raises(TypeError):
        MixedPrecisionPolicy(BF16, None, None, True, norms_stay)
    assert (type(model), dict(model.named_parameters())) == before


@on_ranks(2)
@pytest.mark.skipif(TORCH < (2, 15), reason="FSDP2 has it since 2.15")
@pytest.mark.parametrize("options", [{}, {"reduce_dtype": FP32}, {"cast_forward_inputs": True}])
def test_it_is_that_of_fsdp2(options: dict[str, Any]) -> None:
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = fsdp.MixedPrecisionPolicy(BF16, param_dtype_override_fn=norms_stay, **options)
    mine = train(fully_shard(make(), mesh=mesh, mp_policy=policy))
    other = train(fsdp.fully_shard(make(), mesh=mesh, mp_policy=policy))
    found = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    assert found
