"""Random models and shardings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from tests.fuzz.case import Model, Node, Sharding, Unit

KINDS = {  # parameters that can be tied to parameters of equal shape
    "sequence": {},
    "residual": {},
    "linear": {"up.weight": "size,width", "down.weight": "width,size"},
    "norm": {"norm.weight": "width"},
    "gain": {"weight": "width"},
    "scalar": {},
    "embed": {},
    "conv": {"conv.weight": "conv"},
    "empty": {"first": "0,width"},
    "unused": {"weight": "width"},
    "buffer": {"weight": "width"},
}
FROZEN = {"linear": "up.weight", "norm": "norm.weight", "gain": "bias", "conv": "conv.weight"}
LAYOUTS = ("param", "param", "element", "element", "row", "tensor", 2, 3)
STRATEGIES = ("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def _model(draw: Random) -> Model:
    nodes: list[Node] = []
    orphans: list[int] = []
    num_nodes = draw.randint(1, 7)
    for number in range(num_nodes):
        is_root = number == num_nodes - 1
        taken = len(orphans) if is_root else min(len(orphans), draw.choice((0, 0, 1, 2)))
        children = draw.sample(orphans, taken)
        orphans = [one for one in orphans if one not in children]
        if nodes and draw.random() < 0.12:  # a second parent, or a second call
            extra = draw.randrange(number)
            if extra not in orphans:
                children.append(extra)
        nodes.append(_node(draw, tuple(children), is_root=is_root))
        orphans.append(number)
    return Model(draw.choice((2, 3, 5)), tuple(nodes))


def _node(draw: Random, children: tuple[int, ...], *, is_root: bool) -> Node:
    kind = draw.choice(list(KINDS)) if children else draw.choice(list(KINDS)[2:])
    return Node(
        kind,
        size=draw.choice((1, 2, 3, 5)),
        bias=draw.random() < 0.7,
        children=children,
        io=draw.choice(("tensor", "tensor", "kwargs", "tuple", "dict", "record")),
        checkpoint="" if is_root else draw.choice(("", "", "", "", "reentrant", "plain")),
        times=1 if is_root or draw.random() < 0.75 else draw.choice((0, 2, 3)),
        frozen=(FROZEN[kind],) if kind in FROZEN and draw.random() < 0.15 else (),
    )


def below(model: Model, number: int) -> set[int]:
    """Return the numbers of a node and of all nodes below it."""
    found = {number}
    for child in model.nodes[number].children:
        found |= below(model, child)
    return found


def owners_of(model: Model, units: Sequence[Unit]) -> dict[int, int]:
    """Return for each node the number of the unit that owns its parameters."""
    owners: dict[int, int] = {}
    for number, unit in enumerate(units):
        for node in unit.nodes:
            for inner in sorted(below(model, node)):
                owners.setdefault(inner, number)
    return owners


def _tied(draw: Random, model: Model, units: Sequence[Unit]) -> Model:
    """Return the model, in some cases with a tie inside a unit; a tie across units is refused."""
    owners, root = owners_of(model, units), len(model.nodes) - 1
    by_shape: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for number, node in enumerate(model.nodes):
        for name, shape in KINDS[node.kind].items():
            shape = shape.replace("size", str(node.size)).replace("conv", f"conv{node.size}")
            if number in below(model, root):
                by_shape.setdefault((owners[number], shape), []).append((number, name))
    pairs = [group for group in by_shape.values() if len(group) > 1]
    if not pairs or draw.random() < 0.6:
        return model
    (one, name), (other, there) = draw.sample(draw.choice(pairs), 2)
    return Model(model.width, model.nodes, ((one, name, other, there),))


# Units.


def draw_case(draw: Random, world: int, face: str) -> tuple[Model, Sharding]:
    """Draw a model, and a sharding of it that is rarely refused."""
    model = _model(draw)
    sharding = sharding_of(draw, model, world, face)
    model = _tied(draw, model, sharding.units)
    return _fitting(draw, model, sharding, world), sharding


def _fitting(draw: Random, model: Model, sharding: Sharding, world: int) -> Model:
    """Return the model, in most cases without the parts that this sharding refuses."""
    nodes = model.nodes
    shards = sharding.mesh[-1] if sharding.mesh else world
    ragged = all(unit.layout != "param" for unit in sharding.units)
    if sharding.face != "modules":
        ragged = shards > 1 and sharding.strategy != "NO_SHARD"
    if not ragged and draw.random() < 0.95:
        # Scalar parameters need a ragged layout (docs/limits.md).
        nodes = tuple(replace(n, kind="gain") if n.kind == "scalar" else n for n in nodes)
    if sharding.face == "flat" and draw.random() < 0.95:
        nodes = tuple(replace(node, frozen=()) for node in nodes)  # one requires_grad flag for all
    return replace(model, nodes=nodes)


def sharding_of(draw: Random, model: Model, world: int, face: str) -> Sharding:
    """Draw a sharding of ``model``."""
    mesh = draw.choice([(), (), (), (world,), *_two_dims(world)])
    shards = mesh[-1] if mesh else world
    units = [
        Unit(nodes, _reshard(draw, shards), **_layout(draw, face)) for nodes in _units(draw, model)
    ]
    if face == "modules":
        units = _with_a_list(draw, model, units)
        options: dict[str, Any] = {}
        if draw.random() < 0.15:
            options["budget"] = draw.choice((0, 200, 10**6))
        if draw.random() < 0.1:
            options["offload"] = True
        return Sharding(face, tuple(units), mesh, "FULL_SHARD", options)
    strategy = draw.choice(HYBRID if len(mesh) == 2 else STRATEGIES)
    options = {}
    if draw.random() < 0.3:
        options["backward_prefetch"] = draw.choice((None, "BACKWARD_PRE", "BACKWARD_POST"))
    if draw.random() < 0.15:
        options["limit_all_gathers"] = False
    if draw.random() < 0.15:
        options["forward_prefetch"] = True
    if draw.random() < 0.1:
        options["sync_module_states"] = True
    units = [Unit(unit.nodes) for unit in units]
    return Sharding(face, tuple(units), mesh, strategy, options)


def _two_dims(world: int) -> list[tuple[int, int]]:
    return [(r, world // r) for r in range(1, world + 1) if world % r == 0]


def _reshard(draw: Random, shards: int) -> bool | int | None:
    smaller = [k for k in range(2, shards + 1) if shards % k == 0]
    if smaller and draw.random() < 0.15:
        return draw.choice(smaller)
    return draw.choice((None, None, True, True, False))


def _layout(draw: Random, face: str) -> dict[str, Any]:
    if face != "modules":
        return {}
    layout = draw.choice(LAYOUTS)
    return {"layout": layout, "dim": int(layout == "param" and draw.random() < 0.25)}


def _units(draw: Random, model: Model) -> list[tuple[int, ...]]:
    """Draw units, inner ones first (smaller numbers); each shared module is a unit."""
    root = len(model.nodes) - 1
    calls = [child for node in model.nodes for child in node.children]
    share = draw.choice((0.2, 0.5, 0.9))
    return [
        (number,)
        for number in sorted(below(model, root))
        if number == root or calls.count(number) > 1 or draw.random() < share
    ]


def _with_a_list(draw: Random, model: Model, units: list[Unit]) -> list[Unit]:
    """Return the units, in some cases with two merged into one call of ``fully_shard``."""
    if len(units) < 3 or draw.random() < 0.7:
        return units
    one, other = sorted(draw.sample(range(len(units) - 1), 2))
    first, second = units[one].nodes[0], units[other].nodes[0]
    between = [unit.nodes[0] for unit in units[one + 1 : other + 1]]
    if any(first in below(model, node) for node in between):
        return units  # a unit in between owns the first module
    both = Unit(**{**vars(units[other]), "nodes": (first, second)})
    return [*units[:one], *units[one + 1 : other], both, *units[other + 1 :]]
