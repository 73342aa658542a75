"""Data classes of a case: a model, its sharding, and a program. Their repr can be read back."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any


class _Brief:
    """Leaves fields with default values out of the repr, to keep reproductions short."""

    def __repr__(self) -> str:
        shown = [
            f"{one.name}={getattr(self, one.name)!r}"
            for one in fields(self)  # type: ignore[arg-type]
            if getattr(self, one.name) not in (one.default, {})
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Node(_Brief):
    """A module of the model; children are numbers of earlier nodes, and one may occur twice."""

    kind: str
    size: int = 3
    bias: bool = True
    children: tuple[int, ...] = ()
    io: str = "tensor"
    """Format of the input and output: tensor, kwargs, tuple, dict or record (a dataclass)."""
    checkpoint: str = ""
    """Activation checkpointing by the parents: "", "reentrant" or "plain" (non-reentrant)."""
    times: int = 1
    """Number of consecutive calls by a parent."""
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Model(_Brief):
    """Nodes, the last of which is the root; inputs and outputs have ``width`` columns."""

    width: int
    nodes: tuple[Node, ...]
    ties: tuple[tuple[int, str, int, str], ...] = ()


@dataclass(frozen=True, repr=False)
class Unit(_Brief):
    """One call of ``fully_shard``, or one ``FullyShardedDataParallel`` wrapper."""

    nodes: tuple[int, ...]
    reshard: bool | int | None = None
    layout: str | int = "param"
    """"param", or the granularity of a ragged layout: "element", "row", "tensor" or a number."""
    dim: int = 0
    """Nonzero: ``shard_placement_fn`` shards matrices on their last dim."""


@dataclass(frozen=True, repr=False)
class Sharding(_Brief):
    """The units of a model, in the order of the calls, and their mesh."""

    face: str
    """"modules" (``fully_shard``); "originals" or "flat" (``FullyShardedDataParallel``)."""
    units: tuple[Unit, ...]
    mesh: tuple[int, ...] = ()
    strategy: str = "FULL_SHARD"
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of the wrapper; with ``fully_shard``, "offload" and "budget"."""


@dataclass(frozen=True)
class Step:
    """One step of a program: the name of a method of ``Twins`` and its arguments."""

    op: str
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"step({self.op!r}{options})"


def step(op: str, **options: Any) -> Step:
    """Return a step; a printed case calls this function."""
    return Step(op, options)


@dataclass(frozen=True)
class Case:
    """A complete case, equal on all ranks."""

    seed: int
    world: int
    model: Model
    sharding: Sharding
    optimizer: tuple[str, dict[str, Any]]
    """Name of the class, with the prefix "Sharded" for ``ShardedOptimizer``, and its options."""
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
    """Return the case whose ``str`` is ``text``."""
    names = {cls.__name__: cls for cls in (Case, Model, Node, Sharding, Unit)}
    case = eval(text, {"__builtins__": {}, **names, "step": step, "inf": inf})
    assert isinstance(case, Case)
    return case
