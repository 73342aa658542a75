"""Step time under ``torch.compile``, by block and as a whole, against PyTorch's own compiled alike.

Times are taken as in ``bench.step``. Every contender has forwards of its own, so that calls of one
do not search the graphs of another. The time of compiling itself is not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FunctionType

import torch
from torch import nn

from bench.compare import verdict
from bench.contenders import CONTENDERS, FLAT, FSDP1, FSDP2, PER_PARAMETER, RAGGED, Contender
from bench.machine import grid
from bench.models import GPT, Block
from bench.step import WORLD, Shares, measured

SCOPES = ("blocks", "model")
NAMES = (FSDP1, FSDP2, PER_PARAMETER, RAGGED, FLAT)


def with_own_code(model: nn.Module) -> None:
    """Give the model and its blocks copies of their forwards: Dynamo keeps graphs by code."""
    for kind in (GPT, Block):
        forward = kind.forward
        copied = FunctionType(forward.__code__.replace(), forward.__globals__)
        own = type(kind.__name__, (kind,), {"forward": copied})
        for module in model.modules():
            if type(module) is kind:
                module.__class__ = own


def prepare(model: nn.Module, shard: Callable[[nn.Module], nn.Module], scope: str) -> nn.Module:
    """Shard ``model`` and compile its blocks or all of it."""
    with_own_code(model)
    if scope == "model":
        return torch.compile(shard(model))  # type: ignore[return-value]
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile()
    return shard(model)


def contenders(scope: str) -> dict[str, Contender]:
    """Return the contenders, compiled."""
    return {
        name: replace(one, prepare=partial(prepare, shard=one.prepare, scope=scope))
        for name, one in CONTENDERS.items()
        if name in NAMES
    }


def figures() -> dict[str, dict[str, Shares]]:
    """By scope, kind of time, model and contender: its share of FSDP2's step.

    Raises:
        Loaded: the machine was not idle.
    """
    return {scope: measured(partial(contenders, scope)) for scope in SCOPES}


def report(found: dict[str, dict[str, Shares]]) -> int:
    """Print the tables; how often we take longer than FSDP2, or the flat face than FSDP1."""
    missed = []
    for scope, kinds in found.items():
        missed += [
            f"{name}, {scope}, {shape}"
            for shape, shares in kinds["step"].items()
            for name in (PER_PARAMETER, RAGGED, FLAT)
            if shares[name] > shares[FSDP1 if name == FLAT else FSDP2]
        ]
        print(f"{scope} compiled: share of torch {torch.__version__} FSDP2's step, {WORLD} ranks\n")
        print(grid("model", kinds["step"], NAMES), end="\n\n")
    return verdict(missed, "slower than PyTorch's")
