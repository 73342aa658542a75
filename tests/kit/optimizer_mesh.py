"""Jobs with optimizers on several meshes."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from fullshard.optim import ShardedOptimizer
from tests.ranks.models import noise
from tests.ranks.ragged import CASES, placed, strided, whole_of

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
    "adagrad": (Adagrad, {"lr": 0.1}),  # makes state before the first step
}


class Model(nn.Module):
    """One parameter of each shape in each form; plain tensors if ``plain``."""

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
        """Set gradients by arithmetic; one in five parameters has none."""
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
    direct = Model(list(FORMS))  # torch's optimizer, one parameter at a time
    its = cls(direct.params, **{**kwargs, "foreach": False})
    for step in range(4):
        direct.backward(step)
        its.step()
    check_same(direct, plain, its, reference)


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
