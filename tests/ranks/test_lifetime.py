"""Deleted models free their memory, and destroyed process groups are freed too."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard
from fullshard._torch import mesh as _mesh
from fullshard.comm import flattened
from tests.ranks.autograd import engine_of
from tests.ranks.net import Net, batch, make, optimizer_of, shard, step
from tests.ranks.pool import on_ranks
from tests.versions import TORCH


def sharded_only(model: Net) -> object:
    return None


def one_step(model: Net) -> object:
    return step(model, optimizer_of(model))


def evaluated(model: Net) -> object:
    with torch.no_grad():
        model(batch())
    return None


def a_forward_only(model: Net) -> object:
    """Run a forward; drop the loss with its graph before the model."""
    model(batch()).sum()
    return None


def without_sync(model: Net) -> object:
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    model(batch()).sum().backward()
    return None


def left_unsharded(model: Net) -> object:
    model.unshard()  # type: ignore[operator]
    return None


def copied(model: Net) -> object:
    return copy.deepcopy(model)  # the copy stays alive


def hooked(model: Net) -> object:
    seen: list[Any] = []
    model.head.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.shape))
    return one_step(model)


DEEDS = [
    sharded_only, one_step, evaluated, a_forward_only, without_sync, left_unsharded, copied, hooked,
]  # fmt: skip


@on_ranks(2)
@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_a_deleted_model_is_gone(deed: Callable[[Net], Any]) -> None:
    model = shard(make())
    kept = deed(model)
    unit = engine_of(model).units[0]
    watched: list[Any] = [*model.modules(), engine_of(model), unit, *unit.buckets]
    watched += [*model.parameters(), *unit.unsharded_params()]
    references = [weakref.ref(one) for one in watched]
    del model, unit, watched
    gc.collect()
    alive = [type(reference()).__name__ for reference in references if reference() is not None]
    assert not alive
    del kept


@on_ranks(2)
def test_a_destroyed_group_is_gone() -> None:
    references = []
    for number in range(3):
        group = dist.new_group(list(range(dist.get_world_size())), group_desc=f"run {number}")
        one_step(shard(make(), mesh=DeviceMesh.from_group(group, "cpu")))
        references.append(weakref.ref(group))
        dist.destroy_process_group(group)
        del group
    gc.collect()
    alive = [reference() is not None for reference in references]
    assert not any(alive[1:]), alive  # DTensor's caches keep the first mesh


@on_ranks(2)
def test_a_group_that_was_flattened_is_gone() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    group, alone = dist.new_group(), dist.new_subgroups(1)[0]
    ranks = torch.arange(world).view(world, 1)
    mesh = DeviceMesh.from_group([group, alone], "cpu", mesh=ranks, mesh_dim_names=("a", "b"))
    assert flattened(mesh).get_group() is group and flattened(mesh).get_local_rank() == rank
    reference = weakref.ref(group)
    for one in (group, alone):
        dist.destroy_process_group(one)
    del group, alone, mesh, one
    gc.collect()
    assert reference() is None  # the mesh would hold the group, in PyTorch 2.13 for example


@on_ranks(2)
def test_operations_stay_when_a_model_on_an_equal_mesh_goes() -> None:
    one, other = (init_device_mesh("cpu", (2,), mesh_dim_names=("equal",)) for _ in range(2))
    first = shard(make(), mesh=one)
    second = fullshard.fully_shard(nn.Linear(9, 11), mesh=other)
    weight = second.weight
    gone = weakref.ref(one)
    del first, one
    for clear in _mesh._CACHES:  # of DTensor, which may hold the first mesh
        clear()
    gc.collect()
    assert gone() is None or TORCH < (2, 12)  # its dispatcher keeps some meshes for ever
    with torch.no_grad():
        weight[1].fill_(7.0)  # PyTorch's own DTensor writes to a copy
    assert isinstance(weight, DTensor)
    assert (weight.full_tensor()[1] == 7.0).all()
