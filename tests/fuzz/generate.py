"""From one integer to a case; the same on every machine, run and rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from tests.fuzz.case import Case, Model, Node, Sharding, Step, Unit, step

__all__ = ["MAX_WORLD", "below", "generate", "owners_of", "sharding_of", "world_of"]

MAX_WORLD = 4

KINDS = {  # with parameters that are tied to others of their shape
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
OPTIMIZERS: Sequence[tuple[str, dict[str, Any]]] = (
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    # A large eps: what is nothing but rounding in one order of sums would be a step in another.
    ("Adam", {"lr": 0.05, "eps": 0.1}),
    ("AdamW", {"lr": 0.05, "eps": 0.1, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.05, "eps": 0.1, "amsgrad": True}),
    ("RMSprop", {"lr": 0.02, "eps": 0.1, "momentum": 0.5}),
    ("Adagrad", {"lr": 0.05, "eps": 0.1}),
    ("Adamax", {"lr": 0.05, "eps": 0.1}),
    ("NAdam", {"lr": 0.05, "eps": 0.1}),
    ("Adadelta", {"lr": 0.5, "eps": 0.1}),
)


def world_of(seed: int) -> int:
    """How many ranks the case has: all in turns."""
    return 1 + seed % MAX_WORLD


def generate(seed: int) -> Case:
    """The case of a seed."""
    draw = Random(seed)
    world = world_of(seed)
    face = draw.choice(("modules", "modules", "originals", "flat"))
    model = _model(draw)
    sharding, model = _sharding(draw, model, world, face)
    optimizer = _optimizer(draw, face)
    return Case(seed, world, model, sharding, optimizer, _program(draw, model, sharding, world))


# models


def _model(draw: Random) -> Model:
    nodes: list[Node] = []
    orphans: list[int] = []
    num_nodes = draw.randint(1, 7)
    for number in range(num_nodes):
        is_root = number == num_nodes - 1
        taken = len(orphans) if is_root else min(len(orphans), draw.choice((0, 0, 1, 2)))
        children = draw.sample(orphans, taken)
        orphans = [one for one in orphans if one not in children]
        if nodes and draw.random() < 0.12:  # one that has a parent already, or a second call
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
    """The node and all that are in it."""
    found = {number}
    for child in model.nodes[number].children:
        found |= below(model, child)
    return found


def owners_of(model: Model, units: Sequence[Unit]) -> dict[int, int]:
    """Of each node the number of the unit that has its parameters."""
    owners: dict[int, int] = {}
    for number, unit in enumerate(units):
        for node in unit.nodes:
            for inner in sorted(below(model, node)):
                owners.setdefault(inner, number)
    return owners


def _tied(draw: Random, model: Model, units: Sequence[Unit]) -> Model:
    """Perhaps with a tie, within one unit: docs/differences.md, a tie across calls is refused."""
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


# units


def _sharding(draw: Random, model: Model, world: int, face: str) -> tuple[Sharding, Model]:
    sharding = sharding_of(draw, model, world, face)
    model = _tied(draw, model, sharding.units)
    return sharding, _fitting(draw, model, sharding, world)


def _fitting(draw: Random, model: Model, sharding: Sharding, world: int) -> Model:
    """Without what would be refused, but for now and then."""
    nodes = model.nodes
    shards = sharding.mesh[-1] if sharding.mesh else world
    ragged = all(unit.layout != "param" for unit in sharding.units)
    if sharding.face != "modules":
        ragged = shards > 1 and sharding.strategy != "NO_SHARD"
    if not ragged and draw.random() < 0.95:
        # docs/limits.md, Parameters: scalars are for the ragged layout
        nodes = tuple(replace(n, kind="gain") if n.kind == "scalar" else n for n in nodes)
    if sharding.face == "flat" and draw.random() < 0.95:
        nodes = tuple(replace(node, frozen=()) for node in nodes)  # one parameter, one flag
    return replace(model, nodes=nodes)


def sharding_of(draw: Random, model: Model, world: int, face: str) -> Sharding:
    """Any way to shard ``model``."""
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
    """Inner ones first, as they have smaller numbers. What two modules share is one."""
    root = len(model.nodes) - 1
    calls = [child for node in model.nodes for child in node.children]
    share = draw.choice((0.2, 0.5, 0.9))
    return [
        (number,)
        for number in sorted(below(model, root))
        if number == root or calls.count(number) > 1 or draw.random() < share
    ]


def _with_a_list(draw: Random, model: Model, units: list[Unit]) -> list[Unit]:
    """Perhaps with two units made one, the later one's call being theirs."""
    if len(units) < 3 or draw.random() < 0.7:
        return units
    one, other = sorted(draw.sample(range(len(units) - 1), 2))
    first, second = units[one].nodes[0], units[other].nodes[0]
    between = [unit.nodes[0] for unit in units[one + 1 : other + 1]]
    if any(first in below(model, node) for node in between):
        return units  # a call between them has the first one already
    both = Unit(**{**vars(units[other]), "nodes": (first, second)})
    return [*units[:one], *units[one + 1 : other], both, *units[other + 1 :]]


def _optimizer(draw: Random, face: str) -> tuple[str, dict[str, Any]]:
    name, options = draw.choice(OPTIMIZERS)
    options = dict(options)
    if draw.random() < 0.3:
        options["foreach"] = draw.random() < 0.5
    if face != "flat" and draw.random() < 0.3:
        options["split"] = True
    return ("Sharded" + name if draw.random() < 0.5 else name), options


# programs


def _program(draw: Random, model: Model, sharding: Sharding, world: int) -> tuple[Step, ...]:
    writer = _Writer(draw, model, sharding, world)
    steps: list[Step] = []
    for _ in range(draw.randint(1, 4)):
        steps += writer.phase()
    return tuple(steps)


class _Writer:
    """Writes phases of a program: mostly training, and anything in between."""

    def __init__(self, draw: Random, model: Model, sharding: Sharding, world: int) -> None:
        self.draw, self.model, self.sharding, self.world = draw, model, sharding, world
        self.nodes = sorted(below(model, len(model.nodes) - 1))
        self.batch = 0
        self.between = [name for name in dir(self) if name.startswith("any_")]
        if sharding.face == "modules":
            self.between += [name for name in dir(self) if name.startswith("modules_")]

    def phase(self) -> list[Step]:
        """A training step, with things that happen around it."""
        steps = self._some()
        for _ in range(self.draw.choice((1, 1, 1, 2, 3))):
            steps += [self.train(), *self._some()]
        if self.chance(0.25):
            norm_type = self.draw.choice((2.0, 2.0, 1.0, float("inf")))
            steps.append(step("clip", max_norm=self.draw.choice((0.05, 10.0)), norm_type=norm_type))
        if self.chance(0.9):
            steps.append(step("optimize"))
        if self.chance(0.9):
            steps.append(self.any_zero())
        return steps

    def _some(self) -> list[Step]:
        if not self.chance(0.5):
            return []
        return [getattr(self, self.draw.choice(self.between))()]

    def chance(self, share: float) -> bool:
        """Whether it is so this time."""
        return self.draw.random() < share

    def node(self) -> int:
        """Any node of the model."""
        return self.draw.choice(self.nodes)

    def unit(self) -> int:
        """A node that was given to ``fully_shard``."""
        return self.draw.choice(self.draw.choice(self.sharding.units).nodes)

    def train(self) -> Step:
        self.batch += 1
        options: dict[str, Any] = {"batch": self.batch}
        if self.chance(0.15):
            options["sync"] = False
        if self.chance(0.1):
            options["last"] = False
        if self.chance(0.15):
            options["forwards"] = 2
        if self.chance(0.1):
            options["backwards"] = 2
        return step("train", **options)

    def any_zero(self) -> Step:
        options = {}
        if self.chance(0.3):
            options["by_module"] = True
        if self.chance(0.3):
            options["to_none"] = False
        return step("zero", **options)

    def any_evaluate(self) -> Step:
        self.batch += 1
        mode = self.draw.choice(("no_grad", "inference", "grad"))
        return step("evaluate", batch=self.batch, mode=mode)

    def any_edit(self) -> Step:
        return step("edit", factor=self.draw.choice((0.5, -1.0, 0.9)))

    def any_lend(self) -> Step:
        options: dict[str, Any] = {"node": self.node()}
        for name in ("rank0_only", "offload_to_cpu", "with_grads"):
            if self.chance(0.3):
                options[name] = True
        for name in ("recurse", "writeback"):
            if self.chance(0.25):
                options[name] = False
        if self.sharding.face == "modules":
            if self.chance(0.2):
                options["check"] = True
            if self.chance(0.3):
                options["on_error"] = "discard"
        if self.chance(0.2):
            options["fails"] = True
        return step("lend", **options)

    def any_freeze(self) -> Step:
        return step("freeze", node=self.node(), value=self.chance(0.5))

    def any_rate(self) -> Step:
        return step("rate", factor=self.draw.choice((0.0, 0.5, 2.0)))

    def any_times(self) -> Step:
        return step("times", node=self.node(), times=self.draw.choice((0, 1, 1, 2)))

    def any_values(self) -> Step:
        return step("values", rank0_only=self.chance(0.3))

    def any_compare(self) -> Step:
        return step("compare")

    def any_fail(self) -> Step:
        self.batch += 1
        where = self.draw.choice(("forward", "backward"))
        options = {"node": self.node(), "where": where, "batch": self.batch}
        if self.sharding.face == "modules" and self.chance(0.5):
            options["reset"] = True
        return step("fail", **options)

    def any_copy(self) -> Step:
        return step("copy")

    def any_save(self) -> Step:
        """A round trip through state dicts into a fresh model, perhaps sharded otherwise."""
        options: dict[str, Any] = {"full": self.chance(0.5), "optimizer": self.chance(0.7)}
        if self.chance(0.5):
            face = self.sharding.face
            options["other"] = sharding_of(self.draw, self.model, self.world, face)
        if self.chance(0.3):
            options["cpu"] = False
        if options["full"] and self.chance(0.3):
            options["broadcast"] = True
        return step("save", **options)

    def any_load(self) -> Step:
        return step("load", factor=0.5, broadcast=self.chance(0.5))

    def any_mode(self) -> Step:
        return step("mode", training=self.chance(0.5))

    def modules_unshard(self) -> Step:
        return step("unshard", node=self.unit(), later=self.chance(0.5))

    def modules_wait(self) -> Step:
        return step("wait")

    def modules_reshard(self) -> Step:
        return step("reshard", node=self.unit())

    def modules_reset(self) -> Step:
        return step("reset", node=self.unit())

    def modules_drop(self) -> Step:
        return step("drop", node=self.unit())

    def modules_call(self) -> Step:
        """One of the methods that change how units behave."""
        draw = self.draw
        flag = draw.random() < 0.5
        method, args, recurses = draw.choice(
            (
                ("set_requires_gradient_sync", (flag,), True),
                ("set_requires_all_reduce", (flag,), True),
                ("set_reshard_after_forward", (flag,), True),
                ("set_reshard_after_backward", (flag,), True),
                ("set_prefetch_budget", (draw.choice((None, 0, 100, 10**6)),), False),
                ("set_reduce_scatter_max_input_buffers", (draw.choice((1, 2, 5)),), False),
                ("set_force_sum_reduction_for_comms", (flag,), False),
                ("set_modules_to_forward_prefetch", ("units",), False),
                ("set_modules_to_backward_prefetch", ("units",), False),
            )
        )
        options: dict[str, Any] = {"method": method, "args": args, "node": self.unit()}
        if "units" in args:
            options["args"] = (tuple(self.unit() for _ in range(draw.randint(0, 2))),)
        if recurses and draw.random() < 0.3:
            options["recurse"] = False
        return step("call", **options)
