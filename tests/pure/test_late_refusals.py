"""Refused method calls and late changes explain themselves, and change nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard import errors, fully_shard
from fullshard.frontend.ownership import unit_of
from tests.kit.refusals import layers, train_once

pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.mark.parametrize("value", [2, "yes", None])
def test_reshard_after_forward_takes_only_a_bool_at_run_time(value: Any) -> None:
    model = fully_shard(layers())
    with pytest.raises(errors.ConfigError, match="set_reshard_after_forward") as caught:
        model.set_reshard_after_forward(value)
    assert isinstance(caught.value, ValueError)
    train_once(model)


@pytest.mark.parametrize(("args", "word"), [((-1, True), "-1"), ((10, False), "recurse=False")])
def test_a_prefetch_budget_that_cannot_work_is_refused(args: tuple[int, bool], word: str) -> None:
    model = fully_shard(layers())
    policy = unit_of(model).engine.scheduler.policy
    with pytest.raises(errors.ConfigError, match=word):
        model.set_prefetch_budget(args[0], recurse=args[1])
    assert unit_of(model).engine.scheduler.policy == policy


def test_deepcopy_of_a_part_of_a_list_unit_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard([model[0], model[1]])
    with pytest.raises(errors.ConfigError, match="2 modules, but FSDPLinear contains only 1"):
        copy.deepcopy(model)
    fully_shard(model)
    train_once(copy.deepcopy(model))
    train_once(model)


def test_deepcopy_in_the_middle_of_a_forward_is_refused() -> None:
    model = fully_shard(layers())
    model[1].register_forward_hook(lambda *_: copy.deepcopy(model))
    with pytest.raises(errors.ProtocolError, match="deepcopy"):
        model(torch.ones(1, 4))


def test_deepcopy_of_a_plain_child_is_refused_in_words() -> None:
    model = fully_shard(layers())
    with pytest.raises(errors.FullshardError):
        copy.deepcopy(model[0])
    train_once(model)


@pytest.mark.parametrize("copier", [pickle.dumps, copy.copy])
def test_pickle_and_copy_are_refused(copier: Any) -> None:
    model = fully_shard(layers())
    with pytest.raises(errors.NotBuiltError, match="state_dict"):
        copier(model)
    train_once(model)


def test_a_sharded_class_without_a_unit_says_so() -> None:
    stray = nn.Linear(2, 2)
    stray.__class__ = type(fully_shard(nn.Linear(2, 2)))
    with pytest.raises(errors.ArgumentTypeError, match="member of no unit"):
        stray.unshard()


@pytest.mark.parametrize("call", ["forward", "unshard"])
def test_meta_parameters_are_named_when_they_are_needed(call: str) -> None:
    with torch.device("meta"):
        model = layers()
    fully_shard(model)
    with pytest.raises(errors.ProtocolError) as caught:
        model.unshard() if call == "unshard" else model(torch.ones(1, 4))
    assert isinstance(caught.value, RuntimeError)
    assert all(name in str(caught.value) for name in ("0.weight", "2.bias", "to_empty"))
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    train_once(model)


# Parameters replaced after sharding.


def other_mesh(param: DTensor) -> nn.Parameter:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("other",))
    return nn.Parameter(DTensor.from_local(param.to_local().detach(), mesh, [Shard(0)]))


REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda p: nn.Parameter(torch.ones(p.shape)),
    "none": lambda p: None,
    "shape": lambda p: nn.Parameter(
        DTensor.from_local(torch.ones(7, 7), p.device_mesh, [Shard(0)])
    ),
    "placement": lambda p: nn.Parameter(
        DTensor.from_local(torch.ones(p.shape), p.device_mesh, [Replicate()])
    ),
    "mesh": other_mesh,
}


@pytest.mark.parametrize("kind", REPLACEMENTS)
@pytest.mark.parametrize("ran", [False, True], ids=["before_forward", "after_forward"])
def test_a_wrong_parameter_put_in_place_is_refused_until_it_is_gone(kind: str, ran: bool) -> None:
    model = fully_shard(layers())
    if ran:
        train_once(model)
    right = model[2].weight
    model[2].weight = REPLACEMENTS[kind](right)
    with pytest.raises(errors.ConfigError, match=r"parameter (2\.)?weight"):
        model(torch.ones(1, 4))
    model[2].weight = right
    train_once(model)


def test_a_deleted_parameter_is_refused_in_words() -> None:
    model = fully_shard(layers())
    right = model[2].weight
    del model[2].weight
    with pytest.raises(errors.FullshardError, match="weight"):
        model(torch.ones(1, 4))
    model[2].weight = right
    train_once(model)


def test_a_parameter_put_over_an_unsharded_one_is_not_dropped_in_silence() -> None:
    model = fully_shard(layers())
    model.unshard()
    model[2].weight = nn.Parameter(torch.full((2, 3), 7.0))
    with pytest.raises(errors.FullshardError, match="weight"):
        model(torch.ones(1, 4))


def test_one_dtype_changed_in_a_bucket_is_refused_until_it_is_changed_back() -> None:
    model = fully_shard(layers())
    model[0].to(torch.float64)
    with pytest.raises(errors.ConfigError, match="dtype") as caught:
        model(torch.ones(1, 4))
    assert "2.weight" in str(caught.value)
    model[0].to(torch.float32)
    train_once(model)
