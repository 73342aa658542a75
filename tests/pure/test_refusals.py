"""Modules that ``fully_shard`` refuses; a refusal leaves everything as it was."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from fullshard import FSDPModule, errors, fully_shard
from tests.kit.refusals import layers, modules_in, shape_of, shard_and_train, train_once

pytestmark = pytest.mark.usefixtures("world_of_one")


class WithScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def with_transposed_weight() -> nn.Sequential:
    model = layers()
    model[2].weight = nn.Parameter(torch.ones(3, 2).t())
    return model


def make_contiguous(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(model[2].weight.detach().contiguous())
    shard_and_train(model)


def with_lazy_layer() -> nn.Sequential:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.Linear(4, 3), nn.LazyLinear(2))


def run_before_sharding(model: nn.Module) -> None:
    model(torch.ones(1, 4))
    shard_and_train(model)


def with_script_module() -> nn.Sequential:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.Linear(4, 3), torch.jit.script(nn.Linear(3, 2)))


def under_ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(layers())


def around_ddp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), under_ddp())


def under_torch_fully_shard() -> nn.Module:
    model = layers()
    torch_fully_shard(model[0])
    return model


def torch_fully_sharded_itself() -> nn.Module:
    return torch_fully_shard(layers())


def under_torch_flat_fsdp() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    return nn.Sequential(flat, nn.Linear(4, 2))


def with_dtensor() -> nn.Module:
    model = layers()
    mesh = init_device_mesh("cpu", (1,))
    weight = distribute_tensor(model[2].weight.detach(), mesh, [Replicate()])
    model[2].weight = nn.Parameter(weight)
    return model


def undo_dtensor(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(model[2].weight.full_tensor().detach())
    shard_and_train(model)


def sharded() -> nn.Module:
    return fully_shard(layers())


def child_of_sharded() -> nn.Module:
    return sharded()[2]


def grandchild_of_sharded() -> nn.Module:
    model = fully_shard(nn.Sequential(nn.Sequential(nn.Linear(4, 3)), nn.Linear(3, 2)))
    return model[0]


def still_trains(model: Any) -> None:
    train_once(model)


def nothing_to_do(given: Any) -> None:
    del given


def ignoring_the_scalar(model: WithScalar) -> None:
    fully_shard(model, ignored_params={model.scale})
    train_once(model)


def shard_each(given: Any) -> None:
    for module in modules_in(given):
        if isinstance(module, nn.Linear):
            fully_shard(module)
            assert isinstance(module, FSDPModule)


@dataclass(frozen=True)
class BadModule:
    """A module that cannot be sharded; ``right`` does what the message advises."""

    name: str
    make: Callable[[], Any]
    kind: Kind
    words: tuple[str, ...]
    right: Callable[[Any], None]


class Kind(NamedTuple):
    """The class of an exception, and the builtin class that PyTorch raises for the same module."""

    error: type[Exception]
    builtin: type[Exception]

    def __call__(
        self,
        name: str,
        make: Callable[[], Any],
        *words: str,
        right: Callable[[Any], None] = nothing_to_do,
    ) -> BadModule:
        return BadModule(name, make, self, words, right)


config = Kind(errors.ConfigError, ValueError)
wrong_type = Kind(errors.ArgumentTypeError, TypeError)
unsupported = Kind(errors.UnsupportedError, NotImplementedError)
again = Kind(errors.AlreadyShardedError, AssertionError)

BAD_MODULES = [
    config("empty_list", list, "empty list"),
    config("empty_tuple", tuple, "at least one"),
    wrong_type("number", lambda: 3, "int", "nn.Module"),
    wrong_type("none", lambda: None, "NoneType"),
    wrong_type("class", lambda: nn.Linear, "type"),
    wrong_type("list_with_none", lambda: [nn.Linear(4, 2), None], "NoneType", right=shard_each),
    config(
        "module_list",
        lambda: nn.ModuleList([nn.Linear(4, 2)]),
        "ModuleList",
        "forward",
        right=shard_each,
    ),
    config(
        "module_dict",
        lambda: nn.ModuleDict({"a": nn.Linear(4, 2)}),
        "ModuleDict",
        "forward",
        right=shard_each,
    ),
    config(
        "module_list_in_list",
        lambda: [nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 2)])],
        "ModuleList",
        "forward",
        right=shard_each,
    ),
    config(
        "module_dict_in_tuple",
        lambda: (nn.ModuleDict({"a": nn.Linear(4, 2)}),),
        "ModuleDict",
        "forward",
        right=shard_each,
    ),
    config("scalar", WithScalar, "scale", "scalar", "ignored_params", right=ignoring_the_scalar),
    unsupported(
        "not_contiguous", with_transposed_weight, "2.weight", "contiguous", right=make_contiguous
    ),
    unsupported("lazy", with_lazy_layer, "1.weight", "lazy", right=run_before_sharding),
    unsupported("script_module", with_script_module, "ScriptModule"),
    unsupported("ddp", under_ddp, "DistributedDataParallel", "inside", right=still_trains),
    unsupported(
        "ddp_inside", around_ddp, "DistributedDataParallel", "Sequential", right=still_trains
    ),
    unsupported(
        "torch_fully_shard_inside",
        under_torch_fully_shard,
        "FSDPLinear",
        "torch's FSDP",
        "Sequential",
        right=still_trains,
    ),
    unsupported(
        "torch_fully_shard",
        torch_fully_sharded_itself,
        "FSDPSequential",
        "torch's FSDP",
        right=still_trains,
    ),
    unsupported(
        "torch_flat_fsdp_inside",
        under_torch_flat_fsdp,
        "FullyShardedDataParallel",
        right=still_trains,
    ),
    config("dtensor_apart", with_dtensor, "2.weight", "mesh_dim_names", right=undo_dtensor),
    again("twice", sharded, "Sequential", "before", right=still_trains),
    again("twice_in_list", lambda: [nn.Linear(4, 2), sharded()], "before"),
    again("child_after_parent", child_of_sharded, "weight", "children first"),
    again("container_after_parent", grandchild_of_sharded, "0.weight", "children first"),
]


@pytest.mark.parametrize("case", BAD_MODULES, ids=lambda case: case.name)
def test_what_cannot_be_sharded_is_refused_and_unchanged(case: BadModule) -> None:
    given = case.make()
    before = shape_of(given)
    with pytest.raises(case.kind.error) as caught:
        fully_shard(given)
    assert isinstance(caught.value, case.kind.builtin)
    assert isinstance(caught.value, errors.FullshardError)
    assert all(word in str(caught.value) for word in case.words), str(caught.value)
    assert shape_of(given) == before
    case.right(given)


def test_annotated_parameters_are_refused_without_dp_mesh_dims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Annotations of ``spmd_types`` refer to a mesh whose data-parallel dims must be named."""
    package: Any = ModuleType("spmd_types")
    package.no_typecheck = nullcontext
    package.get_local_type = lambda param: getattr(param, "_local_type", {})
    monkeypatch.setitem(sys.modules, "spmd_types", package)
    model: Any = layers()
    model[2].weight._local_type = {"tp": "R"}
    before = shape_of(model)
    text = r"parameter 2\.weight: it is annotated by spmd_types, but dp_mesh_dims is not given"
    with pytest.raises(errors.ConfigError, match=text):
        fully_shard(model)
    assert shape_of(model) == before
    del model[2].weight._local_type
    shard_and_train(model)
