"""Optimizers on parameters of many meshes end where they end on plain tensors."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from fullshard.errors import ConfigError
from fullshard.optim import ShardedOptimizer
from tests.ranks.models import noise, shared_folder
from tests.ranks.pool import RankPool, on_ranks
from tests.ranks.ragged import CASES, CUT, placed, ragged, strided, whole_of

Form = tuple[tuple[int, ...], tuple[Placement | None, ...]]

FORMS: dict[str, Form] = {
    **{name: CASES[name] for name in ("1d", "hsdp", "rows", "columns", "copies", "two_tp")},
    "strided": ((2, 2), (strided(0, 2), Shard(0))),
    "strided_alone": ((2, 2), (strided(0, 2), Replicate())),
    "dtensor_hsdp": ((2, 2), (Replicate(), Shard(0))),
    "dtensor_tp": ((1, 2, 2), (Replicate(), Shard(0), Shard(1))),
    "dtensor_1d": ((4,), (Shard(0),)),
}
SHAPES = [(5, 3), (1, 7), (0, 3)]
KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 0.01, "foreach": False}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (Adagrad, {"lr": 0.1}),  # has state before the first step
}


class Model(nn.Module):
    """One parameter of every shape in every form; without forms, plain ones."""

    def __init__(self, forms: Sequence[str], *, plain: bool = False) -> None:
        super().__init__()
        shapes = dict.fromkeys(FORMS[name][0] for name in forms)
        meshes = {shape: init_device_mesh("cpu", shape) for shape in shapes}
        self.at: list[tuple[DeviceMesh, Sequence[Placement | None]] | None] = []
        wholes = []
        for seed, (name, shape) in enumerate(itertools.product(forms, SHAPES)):
            mesh_shape, placements = FORMS[name]
            self.at.append(None if plain else (meshes[mesh_shape], placements))
            wholes.append(noise(*shape, seed=seed))
        self.params = nn.ParameterList(self.put(i, whole) for i, whole in enumerate(wholes))

    def put(self, number: int, whole: Tensor) -> Tensor:
        at = self.at[number]
        return whole.clone() if at is None else placed(whole, *at, seed=number)

    def backward(self, step: int) -> None:
        """Gradients by arithmetic, now and then none."""
        for number, param in enumerate(self.params):
            grad = noise(*param.shape, seed=1000 * (step + 1) + number)
            param.grad = None if (number + step) % 5 == 4 else self.put(number, grad)


def check_same(one: Model, other: Model, its: Optimizer, others: Optimizer) -> None:
    for a, b in zip(one.params, other.params, strict=True):
        assert torch.equal(whole_of(a), whole_of(b))
        mine, theirs = its.state.get(a, {}), others.state.get(b, {})
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(whole_of(mine[key]), whole_of(theirs[key])) for key in mine)


def trained(kind: str, forms: Sequence[str], *, steps: int = 4) -> tuple[Model, Optimizer]:
    cls, kwargs = KINDS[kind]
    model = Model(forms)
    optimizer = ShardedOptimizer(model.params, cls, **kwargs)
    for step in range(steps):
        model.backward(step)
        optimizer.step()
    return model, optimizer


def steps_alike(kind: str) -> None:
    cls, kwargs = KINDS[kind]
    plain = Model(list(FORMS), plain=True)
    reference = cls(plain.params, **kwargs)
    for step in range(4):
        plain.backward(step)
        reference.step()
    model, optimizer = trained(kind, list(FORMS))
    check_same(model, plain, optimizer, reference)
    direct = Model(list(FORMS))  # torch's own optimizer, one parameter at a time
    its = cls(direct.params, **{**kwargs, "foreach": False})
    for step in range(4):
        direct.backward(step)
        its.step()
    check_same(direct, plain, its, reference)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_plain_tensors(pool: RankPool, kind: str) -> None:
    pool.run(4, steps_alike, kind)


def exchanges_state(kind: str) -> None:
    model, optimizer = trained(kind, list(FORMS))
    saved = copy.deepcopy(optimizer.state_dict())
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    for state in (saved, torch.load(buffer, weights_only=False)):
        fresh, its = trained(kind, list(FORMS), steps=1)
        with torch.no_grad():
            for param, want in zip(fresh.params, model.params, strict=True):
                param.copy_(want)
        its.load_state_dict(state)
        check_same(fresh, model, its, optimizer)
    for one, its_own in ((model, optimizer), (fresh, its)):
        one.backward(9)
        its_own.step()
    check_same(fresh, model, its, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_are_loaded(pool: RankPool, kind: str) -> None:
    pool.run(4, exchanges_state, kind)


def all_stepped(form: str, *, shift: int) -> tuple[Model, Optimizer]:
    """Every parameter has state: checkpoints of torch want it."""
    model = Model([form])
    optimizer = ShardedOptimizer(model.params, AdamW, lr=0.01)
    for step in range(2):
        for number, param in enumerate(model.params):
            param.grad = model.put(number, noise(*param.shape, seed=number + 10 * step + shift))
        optimizer.step()
    return model, optimizer


@on_ranks(4, timeout_s=120)
@pytest.mark.parametrize(
    "source", ["hsdp", "rows", "copies", "two_tp", "dtensor_hsdp", "dtensor_tp"]
)
def test_checkpoints_go_from_any_mesh_to_any_other(source: str) -> None:
    folder = shared_folder()
    model, optimizer = all_stepped(source, shift=0)
    states = dcp_state.get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    for target in ("1d", "hsdp", "columns", "copies", "dtensor_hsdp", "dtensor_tp", "dtensor_1d"):
        fresh, its = all_stepped(target, shift=50)
        names = ("model", "optimizer")
        into = dict(zip(names, dcp_state.get_state_dict(fresh, its), strict=True))
        dcp.load(into, checkpoint_id=folder)
        dcp_state.set_state_dict(
            fresh, its, model_state_dict=into["model"], optim_state_dict=into["optimizer"]
        )
        check_same(fresh, model, its, optimizer)


@on_ranks(4)
def test_gradients_may_lie_otherwise() -> None:
    """Gradients that lie otherwise are brought to their parameters, on the same mesh."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole, grad = noise(5, 3), noise(5, 3, seed=1)
    plain = nn.Parameter(whole.clone())
    plain.grad = grad.clone()
    AdamW([plain], lr=0.1).step()
    for placements in itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2):
        param = nn.Parameter(placed(whole, mesh, [Shard(0), Shard(1)]))
        param.grad = placed(grad, mesh, placements)
        ShardedOptimizer([param], AdamW, lr=0.1).step()
        assert torch.equal(param.full_tensor(), plain)
        param = nn.Parameter(ragged(whole, mesh, [CUT, Shard(1)]))
        param.grad = placed(grad, mesh, placements)
        ShardedOptimizer([param], AdamW, lr=0.1).step()
        assert torch.equal(param.full_tensor(), plain)
    param = nn.Parameter(placed(whole, mesh, [Shard(0), Replicate()]))
    param.grad = ragged(grad, mesh, [CUT, Shard(0)])
    ShardedOptimizer([param], AdamW, lr=0.1).step()
    assert torch.equal(param.full_tensor(), plain)
    other = init_device_mesh("cpu", (4, 1))
    elsewhere = nn.Parameter(placed(whole, mesh, [Shard(0), Shard(1)]))
    there = ShardedOptimizer([elsewhere], AdamW, lr=0.1)
    elsewhere.grad = placed(grad, mesh, [Shard(0), Shard(1)])
    there.step()
    there.state[elsewhere]["exp_avg"] = placed(grad, other, [Shard(0), Shard(1)])
    elsewhere.grad = placed(grad, mesh, [Shard(0), Shard(1)])
    with pytest.raises(ConfigError, match=r"mesh of shape \(4, 1\)"):
        there.step()
