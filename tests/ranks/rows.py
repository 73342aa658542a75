"""Programs that run with PyTorch's FSDP2 and with fullshard, whose observations are compared."""

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
"""A program: takes the module with the public names; returns its observations."""

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Raised:
    """An exception: the names of its classes, the most derived one first."""

    kinds: tuple[str, ...]


def raised(call: Callable[[], object]) -> Raised | str:
    """Return the exception that ``call`` raises, or a note that it raises none."""
    try:
        call()
    except Exception as error:
        return Raised(tuple(cls.__name__ for cls in type(error).__mro__[:-3]))
    return "nothing raised"


def whole(tensor: Any) -> Any:
    """Return a detached copy of the full tensor; None stays None."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return None if tensor is None else tensor.detach().clone()


def grads(module: nn.Module) -> dict[str, Any]:
    return {name: whole(param.grad) for name, param in module.named_parameters()}


def shown(module: nn.Module) -> list[str]:
    """Return for each parameter whether it is registered sharded or whole."""
    return ["sharded" if isinstance(p, DTensor) else "whole" for p in module.parameters()]


def shard(fsdp: Any, model: Net, **options: Any) -> Any:
    return shard_units(model, model.blocks, by=fsdp.fully_shard, **options)


def differences(theirs: Any, ours: Any, where: str = "") -> list[str]:
    """List the differences of two observations; our exceptions may derive from PyTorch's."""
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
    """Return the observations with PyTorch and with fullshard."""
    return with_torch(program), program(fullshard)


def compare(program: Program) -> list[str]:
    theirs, ours = outcomes(program)
    assert theirs, "a program that sees nothing shows nothing"
    return differences(theirs, ours)


def each(*programs: Any) -> Any:
    """Parametrise a test over programs; ``pytest.param`` adds marks."""
    return pytest.mark.parametrize("program", programs, ids=lambda program: program.__name__)


def check_alike(pool: RankPool, program: Program, world: int = 2) -> None:
    for found in pool.run(world, compare, program):
        assert not found, "\n".join(found)
