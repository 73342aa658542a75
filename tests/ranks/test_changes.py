"""Changes of a sharded module between steps: move, cast, replace, materialise."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import errors, fully_shard
from fullshard.frontend.ownership import units_below
from tests.ranks.models import fill
from tests.ranks.net import Net, apart, batch, make, optimizer_of, shard, step, train_both
from tests.ranks.pool import on_ranks

EXACT = 1e-12


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("ran", [False, True], ids=["before_forward", "after_forward"])
@pytest.mark.parametrize("keep", [False, True], ids=["resharded", "kept"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_a_cast_after_sharding_holds_for_training_and_optimizer(
    ran: bool, keep: bool, dtype: torch.dtype
) -> None:
    tolerance = 1e-6 if dtype is torch.float64 else 2e-2
    plain, model = make(torch.float32), shard(make(torch.float32))
    model.set_reshard_after_backward(not keep)
    references = list(model.parameters())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    if ran:
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            step(one, optimizer)
            for state in optimizer.state.values():
                state.clear()
    plain.to(dtype)
    model.to(dtype)
    same = all(a is b for a, b in zip(references, model.parameters(), strict=True))
    for number in range(2):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            step(one, optimizer, number)
    assert all(p.dtype is dtype for p in references)
    for unit in units_below([model]):
        assert unit.engine.scheduler.residents.units[unit.key].nbytes == unit.nbytes
    for module in (model, *model.blocks):
        module.reshard()
    difference = apart(model, plain)
    assert difference <= tolerance
    assert same


class Wide(nn.Module):
    """A unit whose parameters all belong to plain children."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("ran", [False, True], ids=["before_forward", "after_forward"])
@pytest.mark.parametrize("keep", [False, True], ids=["resharded", "kept"])
def test_casts_of_plain_children_hold(ran: bool, keep: bool) -> None:
    """Casts of single plain children, as a training script may do them, hold."""
    plain = fill(Wide())
    model = fully_shard(copy.deepcopy(plain))
    model.set_reshard_after_backward(not keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if ran:
        step(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        step(model, optimizer)
    if ran and keep:
        model.reshard()  # a cast of unsharded parameters is refused, see below
    for one in (plain, model):
        one.first.to(torch.float64)
        one.second.double()
    step(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 1)
    step(model, optimizer, 1)
    model.reshard()
    assert apart(model, plain) <= 1e-6


@on_ranks(1, 2, 3)
def test_a_cast_of_a_child_that_is_unsharded_is_refused() -> None:
    model = fully_shard(fill(Wide()))
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    model.first.to(torch.float64)
    with pytest.raises(errors.ConfigError, match=r"weight of Linear.*reshard\(\)"):
        step(model, optimizer)


def halve(model: nn.Module) -> nn.Parameter:
    """Return a valid replacement of ``head.weight``: the same placement, halved values."""
    old: Any = model.get_parameter("head.weight")
    if not isinstance(old, DTensor):
        return nn.Parameter(old.detach() / 2)
    local = old.to_local().detach() / 2
    new = DTensor.from_local(
        local,
        old.device_mesh,
        old.placements,
        run_check=False,
        shape=old.shape,
        stride=old.stride(),
    )
    return nn.Parameter(new)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("ran", [False, True], ids=["before_forward", "after_forward"])
def test_a_right_parameter_put_in_place_is_used(ran: bool) -> None:
    plain = make()
    plain.plain[0].weight = nn.Parameter(torch.ones(7, 6, dtype=torch.float64))
    model = shard(copy.deepcopy(plain))
    for one in (plain, model):
        if ran:
            step(one, optimizer_of(one))
        one.head.weight = halve(one)
        optimizer = optimizer_of(one)
        step(one, optimizer, 1)
        step(one, optimizer, 2)
    assert apart(model, plain) <= EXACT


@on_ranks(1, 2, 3)
def test_a_write_into_the_shards_is_seen_by_the_next_forward() -> None:
    """The next forward uses values that were written into the shards in place."""
    plain, model = make(), shard(make(), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    references = list(model.parameters())
    for one in (plain, model):
        one(batch()).sum().backward()
    with torch.no_grad():
        for param in (*plain.parameters(), *references):
            param.mul_(0.5)
        assert (model(batch(1)) - plain(batch(1))).abs().max() <= EXACT


# meta device


def on_meta() -> Net:
    with torch.device("meta"):
        model = Net().double()
    nn.init.ones_(model.scale)
    shard(model)
    assert all(p.is_meta for p in model.parameters())
    return model


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("how", ["assign", "assign_in_parts", "to_empty"])
def test_a_state_dict_brings_a_meta_model_to_life(how: str) -> None:
    state = {n: v.detach().clone() for n, v in shard(make()).state_dict().items()}
    model = on_meta()
    if how == "assign":
        model.load_state_dict(state, assign=True)
    elif how == "assign_in_parts":
        head = {name: value for name, value in state.items() if name.startswith("head")}
        model.load_state_dict(head, strict=False, assign=True)
        rest = {name: value for name, value in state.items() if name not in head}
        model.load_state_dict(rest, strict=False, assign=True)
    else:
        model.to_empty(device="cpu").load_state_dict(state)
    plain = make()
    for one in (plain, model):
        step(one, optimizer_of(one))
    assert apart(model, plain) <= EXACT


@on_ranks(1, process_group=False)
def test_no_process_group_and_no_launcher_is_a_world_of_one() -> None:
    assert train_both(lambda model: step(model, optimizer_of(model))) <= EXACT
