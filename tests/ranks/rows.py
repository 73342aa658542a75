"""One little program, run with PyTorch's FSDP2 and with ours: what they show, side by side."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
from tests.ranks.models import shard_units
from tests.ranks.net import Net
from tests.ranks.pool import RankPool

Program = Callable[[Any], Any]
"""Takes the module that has the public names; returns what it saw, in dictionaries and lists."""

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Raised:
    """An exception, by the names of its classes, the most special one first."""

    kinds: tuple[str, ...]


def raised(call: Callable[[], object]) -> Raised | str:
    """What ``call`` raises."""
    try:
        call()
    except Exception as error:
        return Raised(tuple(cls.__name__ for cls in type(error).__mro__[:-3]))
    return "nothing raised"


def whole(tensor: Any) -> Any:
    """The full tensor, detached; None stays None."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return None if tensor is None else tensor.detach().clone()


def grads(module: nn.Module) -> dict[str, Any]:
    return {name: whole(param.grad) for name, param in module.named_parameters()}


def shown(module: nn.Module) -> list[str]:
    """How each parameter is registered at the moment."""
    return ["sharded" if isinstance(p, DTensor) else "whole" for p in module.parameters()]


def shard(fsdp: Any, model: Net, **options: Any) -> Any:
    return shard_units(model, model.blocks, by=fsdp.fully_shard, **options)


def differences(theirs: Any, ours: Any, where: str = "") -> list[str]:
    """Where two observations are not alike; our exceptions may be more than theirs."""
    if isinstance(theirs, Raised) and isinstance(ours, Raised):
        alike = theirs.kinds[0] in ours.kinds
    elif isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        return [d for key in theirs for d in differences(theirs[key], ours[key], f"{where}/{key}")]
    elif isinstance(theirs, (list, tuple)) and len(theirs) == len(ours):
        pairs = enumerate(zip(theirs, ours, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{where}/{i}")]
    elif isinstance(theirs, Tensor) and isinstance(ours, Tensor):
        kinds = (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype)
        alike = kinds and torch.allclose(theirs, ours, rtol=TOLERANCE, atol=TOLERANCE)
    elif isinstance(theirs, float) and isinstance(ours, float):
        alike = math.isclose(theirs, ours, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    else:
        alike = bool(theirs == ours)
    return [] if alike else [f"{where}: PyTorch {theirs}, fullshard {ours}"]


def with_torch(program: Program) -> Any:
    import torch.distributed.fsdp as theirs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return program(theirs)


def outcomes(program: Program) -> tuple[Any, Any]:
    """What PyTorch's shows, and ours."""
    return with_torch(program), program(fullshard)


def compare(program: Program) -> list[str]:
    theirs, ours = outcomes(program)
    assert theirs, "a program that sees nothing shows nothing"
    return differences(theirs, ours)


def each(*programs: Any) -> Any:
    """The programs of a test, by name; ``pytest.param`` around those that have marks."""
    return pytest.mark.parametrize("program", programs, ids=lambda program: program.__name__)


def check_alike(pool: RankPool, program: Program, world: int = 2) -> None:
    for found in pool.run(world, compare, program):
        assert not found, "\n".join(found)
