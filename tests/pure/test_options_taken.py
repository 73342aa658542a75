"""Option values that PyTorch's FSDP accepts, and that fullshard must accept too."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp

import fullshard
from tests.ranks.models import fill
from tests.versions import TORCH

pytestmark = pytest.mark.usefixtures("world_of_one")


class OwnMixedPolicy(fsdp.MixedPrecisionPolicy):
    """A user's subclass."""


class OwnOffloadPolicy(fsdp.OffloadPolicy):
    """A user's subclass."""


class OwnCPUOffloadPolicy(fsdp.CPUOffloadPolicy):
    """A user's subclass."""


class OwnMixedPrecision(fsdp.MixedPrecision):
    """A user's subclass."""


MIXED_2 = {
    "param_dtype": None,
    "reduce_dtype": None,
    "output_dtype": None,
    "cast_forward_inputs": True,
    "param_dtype_override_fn": None,  # a field of PyTorch since 2.15
}
MIXED_1 = {
    "param_dtype": None,
    "reduce_dtype": None,
    "buffer_dtype": None,
    "keep_low_precision_grads": False,
    "cast_forward_inputs": False,
    "cast_root_forward_inputs": True,
    "_module_classes_to_ignore": (),
    "full_precision_in_eval": False,
}

# Each use makes new values, because an iterator can be used only once.
FSDP2: dict[str, list[Callable[[], Any]]] = {
    "mesh": [lambda: None],
    "reshard_after_forward": [lambda: None, lambda: True, lambda: False, lambda: 1, lambda: "x"],
    "shard_placement_fn": [lambda: None, lambda: lambda param: None],
    "mp_policy": [
        lambda: None,
        OwnMixedPolicy,
        *((lambda: SimpleNamespace(**MIXED_2),) if TORCH < (2, 15) else ()),  # 2.15 copies it
        lambda: fsdp.MixedPrecisionPolicy(cast_forward_inputs=None),  # type: ignore[arg-type]
    ],
    "offload_policy": [
        lambda: None,
        OwnOffloadPolicy,
        lambda: OwnCPUOffloadPolicy(pin_memory=False),
        lambda: fsdp.CPUOffloadPolicy(pin_memory=None),  # type: ignore[arg-type]
    ],
    "ignored_params": [lambda: None, set, list, tuple, frozenset, dict, lambda: iter([])],
}
if "dp_mesh_dims" in inspect.signature(fsdp.fully_shard).parameters:  # PyTorch 2.11 lacks it
    FSDP2["dp_mesh_dims"] = [lambda: None]
FSDP1: dict[str, list[Callable[[], Any]]] = {
    "process_group": [lambda: None],
    "sharding_strategy": [lambda: None, lambda: fsdp.ShardingStrategy.NO_SHARD],
    "cpu_offload": [
        lambda: None,
        lambda: SimpleNamespace(offload_params=False),
        fsdp.CPUOffload,
    ],
    "auto_wrap_policy": [lambda: None, lambda: lambda **_: False],
    "backward_prefetch": [lambda: None, lambda: fsdp.BackwardPrefetch.BACKWARD_PRE],
    "mixed_precision": [
        lambda: None,
        OwnMixedPrecision,
        lambda: SimpleNamespace(**MIXED_1),
        lambda: fsdp.MixedPrecision(keep_low_precision_grads=None),  # type: ignore[arg-type]
    ],
    "ignored_modules": [lambda: None, list, tuple, set, lambda: iter([])],
    "ignored_states": [lambda: None, list, tuple, set, lambda: iter([])],
    "param_init_fn": [lambda: None],
    "device_id": [lambda: "cpu", lambda: torch.device("cpu")],
    "sync_module_states": [lambda: None, lambda: 0, lambda: False],
    "forward_prefetch": [lambda: None, lambda: 0, lambda: 1],
    "limit_all_gathers": [lambda: None, lambda: 0, lambda: 1],
    "use_orig_params": [lambda: None, lambda: 0, lambda: 1],
    "device_mesh": [lambda: None],
}


def outcome(shard: Callable[..., Any], **options: Any) -> str | None:
    """Shard a model and train it; return the error, or None."""
    model = fill(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            shard(model, **options)(torch.ones(2, 4)).sum().backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


def cases(
    table: dict[str, list[Callable[[], Any]]],
) -> list[tuple[str, Callable[[], Any]]]:
    return [(name, value) for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(FSDP2))
def test_fully_shard_takes_the_values_that_pytorch_takes(
    name: str, value: Callable[[], Any]
) -> None:
    theirs = outcome(fsdp.fully_shard, **{name: value()})
    ours = outcome(fullshard.fully_shard, **{name: value()})
    assert (ours is None) == (theirs is None), f"PyTorch: {theirs}; fullshard: {ours}"


@pytest.mark.parametrize(("name", "value"), cases(FSDP1))
def test_wrappers_take_the_values_that_pytorch_takes(name: str, value: Callable[[], Any]) -> None:
    options = {"device_id": "cpu"} | {name: value()}
    theirs = outcome(fsdp.FullyShardedDataParallel, **options)
    ours = outcome(fullshard.FullyShardedDataParallel, **options | {name: value()})
    assert (ours is None) == (theirs is None), f"PyTorch: {theirs}; fullshard: {ours}"


def test_every_option_of_pytorch_is_in_the_table() -> None:
    for table, function in ((FSDP2, fsdp.fully_shard), (FSDP1, fsdp.FullyShardedDataParallel)):
        assert table.keys() == inspect.signature(function).parameters.keys() - {"module"}
