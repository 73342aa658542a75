"""Reduces a failing case to a smaller one that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.fuzz.case import Case, Node, Sharding, Step, Unit


def shrink(case: Case, fails_alike: Callable[[Case], bool], *, tries: int = 200) -> Case:
    """Return the smallest failing case, found by removing one thing after the other."""
    seen = {str(case)}
    found = True
    while found and tries > 0:
        found = False
        for candidate in smaller(case):
            if str(candidate) in seen:
                continue
            seen.add(str(candidate))
            tries -= 1
            if fails_alike(candidate):
                case, found = candidate, True
                break
            if tries <= 0:
                break
    return case


def smaller(case: Case) -> Iterator[Case]:
    """Yield cases with less in them, those with the largest reduction first."""
    yield from _fewer_steps(case)
    if case.world > 1:
        for world in range(1, case.world):
            plain = replace(case.sharding, mesh=())
            yield replace(case, world=world, sharding=plain)
    for number in range(len(case.model.nodes) - 1):
        yield _without_node(case, number)
    for number in range(len(case.sharding.units) - 1):
        units = case.sharding.units[:number] + case.sharding.units[number + 1 :]
        yield replace(case, sharding=replace(case.sharding, units=units))
    yield replace(case, model=replace(case.model, ties=()))
    yield replace(case, sharding=replace(case.sharding, mesh=(), options={}))
    yield replace(case, sharding=replace(case.sharding, options={}))
    yield replace(case, sharding=replace(case.sharding, mesh=()))
    yield replace(case, sharding=replace(case.sharding, strategy="FULL_SHARD"))
    yield replace(case, optimizer=("SGD", {"lr": 0.1}))
    yield replace(case, optimizer=(case.optimizer[0].removeprefix("Sharded"), case.optimizer[1]))
    yield from _simpler_steps(case)
    yield from _simpler_nodes(case)
    yield from _simpler_units(case)


def _fewer_steps(case: Case) -> Iterator[Case]:
    steps = case.steps
    size = len(steps)
    while size := size // 2:
        for start in range(0, len(steps), size):
            yield replace(case, steps=steps[:start] + steps[start + size :])


def _simpler_steps(case: Case) -> Iterator[Case]:
    for number, one in enumerate(case.steps):
        for name in one.options:
            options = {key: value for key, value in one.options.items() if key != name}
            steps = (*case.steps[:number], Step(one.op, options), *case.steps[number + 1 :])
            if name not in ("node", "batch", "method", "args", "factor", "full"):
                yield replace(case, steps=steps)


def _simpler_nodes(case: Case) -> Iterator[Case]:
    plain = Node("gain")
    for number, node in enumerate(case.model.nodes):
        for name in ("kind", "checkpoint", "io", "times", "frozen", "bias", "size"):
            value = getattr(plain, name)
            if getattr(node, name) == value or (name == "kind" and node.frozen):
                continue
            changed = replace(node, **{name: value})
            nodes = (*case.model.nodes[:number], changed, *case.model.nodes[number + 1 :])
            ties = () if name in ("kind", "size") else case.model.ties
            yield replace(case, model=replace(case.model, nodes=nodes, ties=ties))


def _simpler_units(case: Case) -> Iterator[Case]:
    units = case.sharding.units
    for number, unit in enumerate(units):
        for name, value in (("layout", "param"), ("dim", 0), ("reshard", None)):
            if getattr(unit, name) != value:
                changed = replace(unit, **{name: value})
                fewer = (*units[:number], changed, *units[number + 1 :])
                yield replace(case, sharding=replace(case.sharding, units=fewer))


def _without_node(case: Case, gone: int) -> Case:
    """Remove a node; its children become children of its parents."""

    def renumbered(number: int) -> int:
        return number - (number > gone)

    nodes = []
    for number, node in enumerate(case.model.nodes):
        if number == gone:
            continue
        children: list[int] = []
        for child in node.children:
            children += case.model.nodes[gone].children if child == gone else (child,)
        nodes.append(replace(node, children=tuple(map(renumbered, children))))
    ties = tuple(
        (renumbered(a), name, renumbered(b), there)
        for a, name, b, there in case.model.ties
        if gone not in (a, b)
    )
    return replace(
        case,
        model=replace(case.model, nodes=tuple(nodes), ties=ties),
        sharding=_without_unit(case.sharding, gone, renumbered),
        steps=tuple(_steps_without(case, gone, renumbered)),
    )


def _without_unit(sharding: Sharding, gone: int, renumbered: Callable[[int], int]) -> Sharding:
    units: list[Unit] = []
    for unit in sharding.units:
        left = tuple(renumbered(number) for number in unit.nodes if number != gone)
        if left:
            units.append(replace(unit, nodes=left))
    return replace(sharding, units=tuple(units))


def _steps_without(case: Case, gone: int, renumbered: Callable[[int], int]) -> Iterator[Step]:
    for one in case.steps:
        options: dict[str, Any] = dict(one.options)
        if options.get("node") == gone:
            continue
        if "node" in options:
            options["node"] = renumbered(options["node"])
        if options.get("other") is not None:
            options["other"] = _without_unit(options["other"], gone, renumbered)
        if "modules" in options.get("method", ""):
            left = tuple(renumbered(number) for number in options["args"][0] if number != gone)
            options["args"] = (left,)
        yield Step(one.op, options)
