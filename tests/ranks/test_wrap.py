"""Units chosen by a policy train as the unsharded model does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard import wrap
from fullshard.frontend.ownership import unit_of
from tests.ranks.models import GPT, Block, fill, full_parameters, ids
from tests.ranks.pool import on_ranks


def policy_of(kind: str, model: GPT) -> Any:
    if kind == "classes":
        return wrap.ModuleWrapPolicy({Block, nn.Embedding})
    if kind == "sizes":
        return lambda module, recurse, nonwrapped_numel: wrap.size_based_auto_wrap_policy(
            module, recurse, nonwrapped_numel, min_num_params=700
        )

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        if module is model.head:
            return {"reshard_after_forward": False}
        if module is model.blocks[1]:
            return {"layout": fullshard.Ragged()}
        return isinstance(module, Block)

    return wrap.CustomPolicy(choose)


@on_ranks(3)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("kind", "count"), [("classes", 5), ("sizes", 12), ("custom", 5)])
def test_training(kind: str, count: int, shared: bool) -> None:
    """A policy makes the expected number of units, and training equals the unsharded model's."""
    plain = fill(GPT().double())
    if shared:
        plain.blocks[2] = plain.blocks[0]
    model = copy.deepcopy(plain)
    units = fullshard.shard_blocks(model, policy=policy_of(kind, model))
    made = {unit_of(module) for module in model.modules()} - {None}
    assert len(made) == len(units)
    if kind == "custom":
        assert type(next(model.blocks[1].parameters())) is fullshard.RaggedTensor
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for number in range(3):
            tokens = ids(2, 8, vocab=53, seed=number)
            optimizer.zero_grad()
            one.loss(one(tokens[:, :-1]), tokens[:, 1:]).backward()
            optimizer.step()
    got, want = full_parameters(model), full_parameters(plain)
    assert got.keys() == want.keys()
    units, apart = len(units), max((got[name] - want[name]).abs().max().item() for name in want)
    assert apart <= 1e-12
    assert units < count if shared else units == count
