"""Options that ``fully_shard`` refuses; the module stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from fullshard import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    errors,
    fully_shard,
)
from fullshard.frontend.ownership import unit_of
from fullshard.layout import Ragged
from tests.kit.refusals import layers, shape_of, shard_and_train, train_once

Options = dict[str, Any]
Made = Callable[[], Options]


pytestmark = pytest.mark.usefixtures("world_of_one")


@dataclass(frozen=True)
class BadOption:
    """Invalid options of ``fully_shard``, and the error that they raise."""

    name: str
    make: Made
    error: type[Exception]
    builtin: type[Exception]
    words: tuple[str, ...]


def options(**values: Any) -> Made:
    return lambda: values


def mesh_of(*shape: int) -> Made:
    return lambda: {"mesh": init_device_mesh("cpu", shape)}


def on_named(*names: str, dims: Any) -> Made:
    """Return options with a mesh of these dims, and with ``dims`` declared as data-parallel."""
    shape = (1,) * len(names)
    return lambda: {
        "mesh": init_device_mesh("cpu", shape, mesh_dim_names=names),
        "dp_mesh_dims": dims,
    }


DIMS = DataParallelMeshDims(shard="dp")


def raises_for_bias(param: nn.Parameter) -> None:
    if param.dim() == 1:
        raise KeyError("no rule for this parameter")


def config(name: str, make: Made, *words: str) -> BadOption:
    return BadOption(name, make, errors.ConfigError, ValueError, words)


def wrong_type(name: str, make: Made, *words: str) -> BadOption:
    return BadOption(name, make, errors.ArgumentTypeError, TypeError, words)


def not_built(name: str, make: Made, *words: str) -> BadOption:
    return BadOption(name, make, errors.NotBuiltError, NotImplementedError, ("not built", *words))


def placed(value: Any) -> Made:
    """Give ``value`` to the last of two weights only, so that the first passes."""
    return lambda: {"shard_placement_fn": lambda p: value if p.shape == (2, 3) else None}


BAD_OPTIONS = [
    wrong_type("mesh_string", options(mesh="cpu"), "mesh", "str", "DeviceMesh"),
    wrong_type("mesh_group", lambda: {"mesh": dist.group.WORLD}, "ProcessGroup"),
    BadOption(
        "mesh_unnamed", mesh_of(1, 1), errors.ConfigError, AssertionError, ("(1, 1)", "dim_names")
    ),
    config("mesh_3d", mesh_of(1, 1, 1), "3 mesh dims"),
    config("reshard_string", options(reshard_after_forward="yes"), "'yes'", "str", "bool"),
    config("reshard_float", options(reshard_after_forward=0.5), "0.5", "float"),
    config("reshard_more", options(reshard_after_forward=2), "reshard_after_forward=2", "the 1"),
    config("reshard_zero", options(reshard_after_forward=0), "reshard_after_forward=0"),
    wrong_type("policy_none", options(mp_policy=None), "NoneType", "MixedPrecisionPolicy"),
    wrong_type("policy_dtype", options(mp_policy=torch.bfloat16), "param_dtype"),
    wrong_type(
        "policy_partial",
        options(mp_policy=SimpleNamespace(param_dtype=None, reduce_dtype=None)),
        "output_dtype",
        "cast_forward_inputs",
    ),
    config("policy_int", options(mp_policy=MixedPrecisionPolicy(torch.int32)), "param_dtype"),
    config(
        "policy_text",
        options(mp_policy=MixedPrecisionPolicy(reduce_dtype="bf16")),  # type: ignore[arg-type]
        "reduce_dtype",
        "'bf16'",
    ),
    config(
        "policy_output", options(mp_policy=MixedPrecisionPolicy(output_dtype=torch.bool)), "output"
    ),
    wrong_type("offload_name", options(offload_policy="cpu"), "'cpu'", "CPUOffloadPolicy()"),
    wrong_type("offload_class", options(offload_policy=CPUOffloadPolicy), "CPUOffloadPolicy()"),
    config(
        "offload_pin",
        options(offload_policy=CPUOffloadPolicy(pin_memory="yes")),  # type: ignore[arg-type]
        "pin_memory='yes'",
    ),
    wrong_type("mesh_dims_alone", options(dp_mesh_dims=DIMS), "mesh", "NoneType"),
    wrong_type("mesh_dims_tuple", on_named("dp", dims=("dp",)), "tuple", "DataParallelMeshDims"),
    config("mesh_dims_unknown", on_named("data", "tp", dims=DIMS), "'dp'", "'data', 'tp'"),
    config("mesh_dims_unnamed", lambda: {**mesh_of(1)(), "dp_mesh_dims": DIMS}, "names"),
    config("mesh_dims_plain", on_named("dp", "tp", dims=DIMS), "0.weight", "plain tensor"),
    config(
        "mesh_dims_placement",
        lambda: {
            **on_named("dp", dims=DataParallelMeshDims(replicate="dp"))(),
            "shard_placement_fn": lambda p: Shard(0),
        },
        "0.weight",
        "replicated",
    ),
    wrong_type("layout_string", options(layout="ragged"), "'ragged'", "Ragged()"),
    wrong_type("layout_class", options(layout=Ragged), "Ragged()"),
    config(
        "layout_and_placement",
        options(layout=Ragged(), shard_placement_fn=lambda p: Shard(0)),
        "shard_placement_fn",
        "0.weight",
        "PerParameter()",
    ),
    config("placement_replicate", placed(Replicate()), "2.weight", "Replicate"),
    config("placement_int", placed(1), "2.weight", "Shard(dim)"),
    config("placement_tuple", placed((Shard(0),)), "2.weight"),
    config("placement_mesh", placed(ShardPlacementResult(None, "tp")), "2.weight", "'tp'"),
    BadOption(
        "placement_dim",
        placed(Shard(2)),
        errors.ConfigError,
        AssertionError,
        ("2.weight", "(2, 3)"),
    ),
    BadOption(
        "placement_negative_dim",
        placed(Shard(-3)),
        errors.ConfigError,
        AssertionError,
        ("2.weight",),
    ),
]


@pytest.mark.parametrize("case", BAD_OPTIONS, ids=lambda case: case.name)
def test_a_bad_option_is_refused_and_the_module_is_unchanged(case: BadOption) -> None:
    model = layers()
    before = shape_of(model)
    with pytest.raises(case.error) as caught:
        fully_shard(model, **case.make())
    assert isinstance(caught.value, case.builtin)
    assert all(word in str(caught.value) for word in case.words), str(caught.value)
    assert shape_of(model) == before
    shard_and_train(model)


def test_a_placement_function_that_raises_changes_nothing() -> None:
    model = layers()
    before = shape_of(model)
    with pytest.raises(KeyError, match="no rule"):
        fully_shard(model, shard_placement_fn=raises_for_bias)
    assert shape_of(model) == before
    shard_and_train(model)


def test_a_refused_root_leaves_its_sharded_children_as_they_were() -> None:
    model = layers()
    fully_shard(model[0])
    before, engine = shape_of(model), unit_of(model[0]).engine
    for case in BAD_OPTIONS:
        with pytest.raises(case.error):
            fully_shard(model, **case.make())
    assert shape_of(model) == before
    assert unit_of(model[0]).engine is engine
    shard_and_train(model)


def test_sharding_around_a_running_child_is_allowed_only_between_steps() -> None:
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
    outer = nn.Sequential(model)
    model[1].register_forward_hook(lambda *_: fully_shard(outer))
    with pytest.raises(errors.ProtocolError, match="middle of a forward") as caught:
        outer(torch.ones(1, 4))
    assert isinstance(caught.value, RuntimeError)
    model[1]._forward_hooks.clear()
    train_once(outer)
    shard_and_train(outer)


def test_mesh_dims_name_something() -> None:
    with pytest.raises(errors.ConfigError, match="neither") as caught:
        DataParallelMeshDims()
    assert isinstance(caught.value, ValueError)
    dims = DataParallelMeshDims(shard=("a", "b"), replicate="c")
    assert (dims.shard_names, dims.replicate_names) == (("a", "b"), ("c",))
