"""``unshard_params``: every combination of options equals the same edits of plain tensors."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
from tests.kit.tensor_parallel import Net
from tests.kit.unshard_params import (
    LAYOUTS,
    WORLDS,
    full,
    loss_of,
    plain_net,
    sharded_net,
    state_of,
)
from tests.ranks.pool import RankPool

CASES = [*itertools.product(("1d", "hsdp", "2d"), LAYOUTS), ("copies", "per_param")]
FLAGS = ("writeback", "rank0_only", "offload_to_cpu", "with_grads", "recurse")


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


@dataclass
class Reference:
    """The expected parameters and gradients as plain tensors."""

    params: dict[str, Tensor]
    grads: dict[str, Tensor | None] = field(default_factory=dict)

    def check(self, model: nn.Module, *, grads: bool) -> None:
        for name, param in model.named_parameters():
            assert torch.equal(full(param), self.params[name]), name
            if grads:
                assert same(full(param.grad), self.grads[name]), name


def locals_of(model: nn.Module) -> list[Tensor]:
    """Return copies of this rank's parameters and gradients."""
    tensors: list[Any] = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    return [tensor.to_local().detach().clone() for tensor in tensors]


def edit(name: str, value: Any, grad: Any) -> Any:
    """Edit a parameter and its gradient in place, also of plain tensors; return the gradient."""
    value.neg_().add_(0.01)
    if grad is None:
        return torch.ones_like(value) if name == "gain" else None
    return None if name == "gain" else grad.mul_(3)


def one_combination(
    model: Any, reference: Reference, plain: Net, is_first: bool, flags: dict[str, bool]
) -> None:
    before = state_of(model)
    shards, values = dict(model.named_parameters()), locals_of(model)
    lent = is_first or not flags["rank0_only"]
    with fullshard.unshard_params(model, **flags), torch.no_grad():
        names = [name for name, _ in model.named_parameters()]
        assert names == [name for name, _ in plain.named_parameters()]
        assert model.head.weight is model.embed.weight
        for name, param in model.named_parameters():
            inner = name.startswith("blocks.")
            if not lent or (inner and not flags["recurse"]):
                assert param is shards[name]
                continue
            assert isinstance(param, nn.Parameter) and param is not shards[name]
            assert (type(param) is nn.Parameter) or isinstance(param, DTensor)
            assert (param.shape, param.dtype, param.device.type, param.requires_grad) == (
                shards[name].shape,
                torch.float64,
                "cpu",
                shards[name].requires_grad,
            )
            assert torch.equal(full(param), reference.params[name]), name
            expected = reference.grads[name] if flags["with_grads"] else None
            assert same(full(param.grad), expected), name
            param.grad = edit(name, param, param.grad)
    if flags["writeback"]:
        for name, value in reference.params.items():
            if name.startswith("blocks.") and not flags["recurse"]:
                continue
            grad = edit(name, value, reference.grads[name] if flags["with_grads"] else None)
            if flags["with_grads"]:
                reference.grads[name] = grad
        reference.check(model, grads=flags["with_grads"])
    else:
        assert all(map(torch.equal, locals_of(model), values))
    assert state_of(model) == before


def all_combinations(mesh: str, layout: str) -> int:
    plain, model = plain_net(), sharded_net(mesh, layout)
    loss_of(model).backward()
    loss_of(plain).backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(param), other.detach()), name
        assert (param.grad is None) == (other.grad is None), name
        if param.grad is not None:
            assert (full(param.grad) - other.grad).abs().max() < 1e-12
    reference = Reference(
        {name: param.detach().clone() for name, param in plain.named_parameters()},
        {name: full(param.grad) for name, param in model.named_parameters()},
    )
    is_first = dist.get_rank() == 0 or (mesh == "2d" and dist.get_rank() == 1)
    combinations = list(itertools.product((True, False), repeat=len(FLAGS)))
    for values in combinations:
        one_combination(model, reference, plain, is_first, dict(zip(FLAGS, values, strict=True)))
    plain.load_state_dict({**reference.params, "head.weight": reference.params["embed.weight"]})
    with torch.no_grad():
        assert (loss_of(model) - loss_of(plain)).abs() < 1e-12
    return len(combinations)


@pytest.mark.parametrize(("mesh", "layout"), CASES)
def test_every_combination_equals_plain_tensors(pool: RankPool, mesh: str, layout: str) -> None:
    world = WORLDS[mesh]
    assert pool.run(world, all_combinations, mesh, layout) == [32] * world
