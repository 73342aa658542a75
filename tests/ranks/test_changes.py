"""What users do to a sharded module between steps: move, cast, replace, materialise."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import errors, fully_shard
from fullshard.frontend.ownership import units_below
from tests.ranks.models import fill, full_parameters, message_of
from tests.ranks.net import Net, apart, batch, make, optimizer_of, shard, step
from tests.ranks.pool import RankPool, on_ranks

worlds = pytest.mark.parametrize("world", [1, 2, 3])
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
    for module in (model, *model.blocks):
        module.reshard()
    difference = apart(model, plain)
    assert difference <= tolerance
    assert same


@on_ranks(2)
@pytest.mark.parametrize("ran", [False, True], ids=["before_forward", "after_forward"])
def test_the_scheduler_knows_the_bytes_of_a_cast_module(ran: bool) -> None:
    model = shard(make(torch.float32))
    if ran:
        step(model, optimizer_of(model))
    model.to(torch.float64)
    step(model, optimizer_of(model))
    units = units_below([model])
    assert all(u.engine.scheduler.residents.units[u.key].nbytes == u.nbytes for u in units)


class Wide(nn.Module):
    """A unit whose parameters all stand in plain children."""

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
    """Every plain child on its own, as a training script may do."""
    plain = fill(Wide())
    model = fully_shard(copy.deepcopy(plain))
    model.set_reshard_after_backward(not keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if ran:
        step(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        step(model, optimizer)
    if ran and keep:
        model.reshard()  # what is unsharded cannot be cast, see below
    for one in (plain, model):
        one.first.to(torch.float64)
        one.second.double()
    step(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 1)
    step(model, optimizer, 1)
    model.reshard()
    assert apart(model, plain) <= 1e-6


def cast_an_unsharded_child() -> str:
    model = fully_shard(fill(Wide()))
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    model.first.to(torch.float64)
    return message_of(errors.ConfigError, step, model, optimizer)


@worlds
def test_a_cast_of_a_child_that_is_unsharded_is_refused(pool: RankPool, world: int) -> None:
    for message in pool.run(world, cast_an_unsharded_child):
        assert "weight of Linear" in message
        assert "reshard()" in message


def halve(model: nn.Module) -> nn.Parameter:
    """A right replacement of ``head.weight``: the same placement, other values."""
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
    if True:
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


def write_through_shards() -> float:
    """In-place writes into the shards between steps, without an optimizer."""
    plain = make()
    model = shard(copy.deepcopy(plain), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    references = {name: param for name, param in model.named_parameters()}
    for one in (plain, model):
        one(batch()).sum().backward()
    with torch.no_grad():
        for name, param in plain.named_parameters():
            param.mul_(0.5)
            references[name].mul_(0.5)
        return (model(batch(1)) - plain(batch(1))).abs().max().item()


@worlds
def test_a_write_into_the_shards_is_seen_by_the_next_forward(pool: RankPool, world: int) -> None:
    assert max(pool.run(world, write_through_shards)) <= EXACT


# meta device


def reset_all(model: nn.Module) -> None:
    torch.manual_seed(7)  # jobs have a generator of their own
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def on_meta() -> Net:
    with torch.device("meta"):
        model = Net().double()
    nn.init.ones_(model.scale)
    shard(model)
    assert all(p.is_meta for p in model.parameters())
    return model


def from_reset() -> dict[str, Tensor]:
    model = on_meta()
    model.to_empty(device="cpu")
    nn.init.ones_(model.scale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DTensor's, about random numbers on a CPU mesh
        reset_all(model)
    result = full_parameters(model)
    step(model, optimizer_of(model))
    return result


def test_reset_parameters_gives_the_same_for_every_world_size(pool: RankPool) -> None:
    plain = Net().double()
    with torch.random.fork_rng():
        reset_all(plain)
    for world in (1, 2, 3, 4):
        for result in pool.run(world, from_reset):
            for name, param in plain.named_parameters():
                assert torch.equal(result[name], param), (world, name)


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


@on_ranks(2)
def test_sharding_inside_the_meta_context_stays_on_meta() -> None:
    with torch.device("meta"):
        model = shard(Net().double())
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())


# meshes


def mesh_of(kind: str) -> DeviceMesh | None:
    if kind == "init_device_mesh":
        return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    if kind == "from_group":
        return DeviceMesh.from_group(dist.group.WORLD, "cpu")
    if kind == "submesh":
        return init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("a", "b"))["b"]
    return None


def train_on(kind: str) -> float:
    plain = make()
    mesh = mesh_of(kind)
    model = shard(copy.deepcopy(plain), mesh=mesh)
    if mesh is not None:
        assert all(p.device_mesh == mesh for p in model.parameters())
    for one in (plain, model):
        step(one, optimizer_of(one))
    return apart(model, plain)


@worlds
@pytest.mark.parametrize("kind", ["none", "init_device_mesh", "from_group", "submesh"])
def test_meshes_of_every_origin_train_alike(pool: RankPool, world: int, kind: str) -> None:
    assert max(pool.run(world, train_on, kind)) <= EXACT


def test_no_process_group_and_no_launcher_is_a_world_of_one(pool: RankPool) -> None:
    assert max(pool.run(1, train_on, "none", process_group=False)) <= EXACT
