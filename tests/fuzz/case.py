"""What a case is: a model, how it is sharded, and a program. Plain values, printed as written."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any


class _Brief:
    """Printed without what has its default, so that a reproduction is short, and can be read."""

    def __repr__(self) -> str:
        shown = [
            f"{one.name}={getattr(self, one.name)!r}"
            for one in fields(self)  # type: ignore[arg-type]
            if getattr(self, one.name) not in (one.default, {})
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Node(_Brief):
    """A module of the model; children are numbers of nodes before it, one perhaps twice."""

    kind: str
    size: int = 3
    bias: bool = True
    children: tuple[int, ...] = ()
    io: str = "tensor"
    """What forward takes and gives: tensor, kwargs, tuple, dict or record (a dataclass)."""
    checkpoint: str = ""
    """How parents run it: "", "reentrant" or "plain" (non-reentrant) activation checkpoints."""
    times: int = 1
    """How many times in a row parents call it."""
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Model(_Brief):
    """Nodes, the last being the root; all take and give tensors of ``width`` columns."""

    width: int
    nodes: tuple[Node, ...]
    ties: tuple[tuple[int, str, int, str], ...] = ()


@dataclass(frozen=True, repr=False)
class Unit(_Brief):
    """One call of ``fully_shard``, or one wrapper."""

    nodes: tuple[int, ...]
    reshard: bool | int | None = None
    layout: str | int = "param"
    """param, or the granularity of a ragged layout: element, row, tensor or a number."""
    dim: int = 0
    """On which matrices are cut by ``shard_placement_fn``."""


@dataclass(frozen=True, repr=False)
class Sharding(_Brief):
    """Which modules are units, in the order of the calls, and on which mesh."""

    face: str
    """modules (``fully_shard``), originals or flat (``FullyShardedDataParallel``)."""
    units: tuple[Unit, ...]
    mesh: tuple[int, ...] = ()
    strategy: str = "FULL_SHARD"
    options: dict[str, Any] = field(default_factory=dict)
    """Further ones of the wrapper, or ``offload`` and ``budget``."""


@dataclass(frozen=True)
class Step:
    """One step of a program: the name of a method of ``Twins`` and its arguments."""

    op: str
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"step({self.op!r}{options})"


def step(op: str, **options: Any) -> Step:
    """A step as it is printed."""
    return Step(op, options)


@dataclass(frozen=True)
class Case:
    """What all ranks do alike."""

    seed: int
    world: int
    model: Model
    sharding: Sharding
    optimizer: tuple[str, dict[str, Any]]
    """Its class, perhaps after "Sharded", and its options."""
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        nodes = "".join(f"\n            {node!r}," for node in self.model.nodes)
        units = "".join(f"\n            {unit!r}," for unit in self.sharding.units)
        steps = "".join(f"\n        {one!r}," for one in self.steps)
        model = repr(replace(self.model, nodes=())).replace("()", f"({nodes}\n        )", 1)
        sharding = repr(replace(self.sharding, units=())).replace("()", f"({units}\n        )", 1)
        return (
            f"Case(\n    seed={self.seed},\n    world={self.world},\n    model={model},"
            f"\n    sharding={sharding},\n    optimizer={self.optimizer!r},"
            f"\n    steps=({steps}\n    ),\n)"
        )


def read(text: str) -> Case:
    """The case that was printed so."""
    names = {cls.__name__: cls for cls in (Case, Model, Node, Sharding, Unit)}
    case = eval(text, {"__builtins__": {}, **names, "step": step, "inf": inf})
    assert isinstance(case, Case)
    return case
