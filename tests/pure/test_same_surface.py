"""Compares public names, parameters and defaults with those of the installed PyTorch.

``OMITTED`` lists names that only PyTorch has, with the reason. The tests fail for a new name of
PyTorch, and for a listed name that fullshard has.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.fsdp import _fully_shard as fsdp2
from torch.distributed.fsdp import api, fully_sharded_data_parallel, sharded_grad_scaler, wrap
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fully_shard

import fullshard
from tests.versions import TORCH

NEWEST = (2, 15)
"""The newest PyTorch for which ``OMITTED`` is complete."""

OMITTED = {
    "FlatParameter": "how PyTorch's FSDP1 stores parameters, imported but in no __all__",
    "get_cls_to_fsdp_cls": "for Dynamo: in fullshard.compat alone, see compat/states.py",
    "disable_fsdp_module_new_init": "how PyTorch slices containers; our slices are never sharded",
}
"""Names that only PyTorch has, and the reason."""

WIRES = ("AllGather", "Comm", "ReduceScatter")
PLACES = {
    "torch.distributed.fsdp": (fsdp, [*fsdp.__all__, "FlatParameter"]),
    "FSDP2": (fsdp2, fsdp2.__all__),
    "FSDP2's functions": (_fully_shard, _fully_shard.__all__),
    "FSDP2's wires": (_fsdp_api, WIRES),
    "FSDP1": (fully_sharded_data_parallel, fully_sharded_data_parallel.__all__),
    "FSDP1's options": (api, api.__all__),
    "policies": (wrap, wrap.__all__),
    "gradient scaler": (sharded_grad_scaler, ["ShardedGradScaler"]),
}
"""Where PyTorch has public names, and private modules from which programs import."""

OURS = SimpleNamespace(
    **{name: getattr(fullshard.wrap, name) for name in fullshard.wrap.__all__},
    ShardedGradScaler=fullshard.optim.ShardedGradScaler,
    **{name: getattr(fullshard, name) for name in fullshard.__all__ if name != "wrap"},
)


class Difference(NamedTuple):
    """A name or call that differs, or that only one of both has."""

    path: str
    theirs: object
    ours: object


def public_members(cls: type) -> set[str]:
    """Return public names of ``cls`` that it defines itself, or that its base class lacks."""
    base = nn.Module if issubclass(cls, nn.Module) else object
    known = set(dir(base)) - set(vars(cls))
    return {name for name in dir(cls) if not name.startswith("_") and name not in known}


def default_of(value: object) -> object:
    """Return a default in a form that compares equal if the meaning is equal."""
    if isinstance(value, enum.Enum):
        return type(value).__name__, value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, repr(value)
    return value


def parameters(function: Callable[..., Any]) -> dict[str, tuple[str, object]] | None:
    """Return kind and default of public parameters, by position or, if keyword-only, by name."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return None
    return {
        f"{i}: {p.name}" if p.kind is not p.KEYWORD_ONLY else p.name: (
            p.kind.name,
            default_of(p.default),
        )
        for i, p in enumerate(found)
        if not p.name.startswith("_")
    }


def compare_calls(path: str, theirs: Any, ours: Any) -> Iterator[Difference]:
    their_params, our_params = parameters(theirs), parameters(ours)
    if their_params is None or our_params is None:
        return
    for name, kind_and_default in their_params.items():
        if our_params.get(name) == kind_and_default or f"{path}.{name}" in OMITTED:
            continue
        if name in our_params and is_of_newer_fields(kind_and_default, our_params[name]):
            continue
        yield Difference(f"{path}({name})", kind_and_default, our_params.get(name))
    num_by_position = sum(":" in name for name in their_params)
    for name, (kind, default) in our_params.items():
        needed = default is inspect.Parameter.empty and not kind.startswith("VAR")
        between = ":" in name and int(name.partition(":")[0]) < num_by_position
        if name not in their_params and (needed or between):
            yield Difference(f"{path}({name})", None, (kind, default))


def is_of_newer_fields(theirs: tuple[str, Any], ours: tuple[str, Any]) -> bool:
    """Return whether both defaults are policies of one name; their fields are compared apart."""
    (their_kind, their_default), (our_kind, our_default) = theirs, ours
    return (
        their_kind == our_kind
        and isinstance(their_default, tuple)
        and isinstance(our_default, tuple)
        and their_default[:1] == our_default[:1]
        and str(their_default[0]).endswith("Policy")
    )


def compare(path: str, theirs: Any, ours: Any) -> Iterator[Difference]:
    """Yield the differences of one public name."""
    if not inspect.isclass(theirs):
        yield from compare_calls(path, theirs, ours)
        return
    if not issubclass(theirs, enum.Enum):
        yield from compare_calls(path, theirs, ours)
    for name in sorted(public_members(theirs)):
        inner = f"{path}.{name}"
        if inner in OMITTED:
            continue
        if not hasattr(ours, name):
            yield Difference(inner, "has it", None)
            continue
        one, other = getattr(theirs, name), getattr(ours, name)
        if isinstance(one, enum.Enum):
            if one.value != other.value:
                yield Difference(inner, one.value, other.value)
        elif callable(one):
            yield from compare_calls(inner, one, other)
        elif is_property(theirs, name) != is_property(ours, name):
            yield Difference(inner, type(one), type(other))


def is_property(cls: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(cls, name), property)


@pytest.mark.parametrize("place", PLACES)
def test_every_name_parameter_and_default_of_pytorch_is_ours(place: str) -> None:
    module, names = PLACES[place]
    found = []
    for name in names:
        if name in OMITTED:
            continue
        if not hasattr(OURS, name):
            found.append(Difference(name, "has it", None))
        else:
            found += compare(name, getattr(module, name), getattr(OURS, name))
    assert not found


@pytest.mark.parametrize("path", OMITTED)
def test_what_is_omitted_is_missing_here_and_not_there(path: str) -> None:
    assert not exists(OURS, path), f"{path} is in fullshard now: remove it from OMITTED"
    if TORCH >= NEWEST:
        there = any(exists(module, path) for module, _ in PLACES.values())
        assert there, f"PyTorch no longer has {path}: remove it from OMITTED"


def exists(namespace: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(namespace, name):
            return False
        namespace = getattr(namespace, name)
    return True


class Theirs:
    def same(self, a: int, *, b: int = 1) -> None: ...

    def other_default(self, a: int = 1) -> None: ...

    def other_name(self, a: int) -> None: ...

    def fewer(self, a: int, b: int = 2, *, c: int = 3) -> None: ...

    def longer(self, a: int) -> None: ...

    def gone(self) -> None: ...


class Ours:
    def same(self, a: int, *, more: bool = False, b: int = 1) -> None: ...

    def other_default(self, a: int = 2) -> None: ...

    def other_name(self, n: int) -> None: ...

    def fewer(self, a: int) -> None: ...

    def longer(self, a: int, b: int = 2) -> None: ...


def test_differences_are_found() -> None:
    assert {difference.path for difference in compare("X", Theirs, Ours)} == {
        "X.other_default(1: a)",
        "X.other_name(1: a)",
        "X.other_name(1: n)",
        "X.fewer(2: b)",
        "X.fewer(c)",
        "X.gone",
    }
