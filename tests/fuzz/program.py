"""Random programs: mostly training steps, with other operations in between."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.fuzz.case import Model, Sharding, Step, step
from tests.fuzz.draw import below, sharding_of


def draw_program(draw: Random, model: Model, sharding: Sharding, world: int) -> tuple[Step, ...]:
    """Draw one to four phases of training."""
    writer = _Writer(draw, model, sharding, world)
    steps: list[Step] = []
    for _ in range(draw.randint(1, 4)):
        steps += writer.phase()
    return tuple(steps)


class _Writer:
    """Draws the steps of a program."""

    def __init__(self, draw: Random, model: Model, sharding: Sharding, world: int) -> None:
        self.draw, self.model, self.sharding, self.world = draw, model, sharding, world
        self.nodes = sorted(below(model, len(model.nodes) - 1))
        self.batch = 0
        self.between = [name for name in dir(self) if name.startswith("any_")]
        if sharding.face == "modules":
            self.between += [name for name in dir(self) if name.startswith("modules_")]
            self.between += ["modules_call"] * 4  # more often, as it draws one of many methods

    def phase(self) -> list[Step]:
        """Draw backwards, clipping, and an optimizer step, with other operations in between."""
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
        """Return True with probability ``share``."""
        return self.draw.random() < share

    def some_of(self, **shares: tuple[float, Any]) -> dict[str, Any]:
        """Return each option with the probability that stands before its value."""
        return {name: value for name, (share, value) in shares.items() if self.chance(share)}

    def node(self) -> int:
        """Draw a node of the model."""
        return self.draw.choice(self.nodes)

    def unit(self) -> int:
        """Draw a node that was passed to ``fully_shard``."""
        return self.draw.choice(self.draw.choice(self.sharding.units).nodes)

    def train(self) -> Step:
        self.batch += 1
        has_replicas = len(self.sharding.mesh) == 2 and self.sharding.mesh[0] > 1
        shares = {"sync": (0.15, False)}
        if self.sharding.face == "modules" and has_replicas:
            shares["partial"] = (0.25, True)
        options = self.some_of(**shares, last=(0.1, False), forwards=(0.15, 2), backwards=(0.1, 2))
        return step("train", batch=self.batch, **options)

    def any_zero(self) -> Step:
        return step("zero", **self.some_of(by_module=(0.3, True), to_none=(0.3, False)))

    def any_evaluate(self) -> Step:
        self.batch += 1
        mode = self.draw.choice(("no_grad", "inference", "grad"))
        return step("evaluate", batch=self.batch, mode=mode)

    def any_edit(self) -> Step:
        return step("edit", factor=self.draw.choice((0.5, -1.0, 0.9)))

    def any_lend(self) -> Step:
        shares: dict[str, Any] = dict.fromkeys(
            ("rank0_only", "offload_to_cpu", "with_grads"), (0.3, True)
        )
        shares |= dict.fromkeys(("recurse", "writeback"), (0.25, False))
        if self.sharding.face == "modules":
            shares |= {"check": (0.2, True), "on_error": (0.3, "discard")}
        return step("lend", node=self.node(), **self.some_of(**shares, fails=(0.2, True)))

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
        options: dict[str, Any] = {"node": self.node(), "where": where, "batch": self.batch}
        if self.sharding.face == "modules":
            options |= self.some_of(reset=(0.5, True))
        return step("fail", **options)

    def any_copy(self) -> Step:
        return step("copy")

    def any_save(self) -> Step:
        """Load a new model, perhaps with another sharding, through state dicts."""
        options: dict[str, Any] = {"full": self.chance(0.5), "optimizer": self.chance(0.7)}
        if self.chance(0.5):
            face = self.sharding.face
            options["other"] = sharding_of(self.draw, self.model, self.world, face)
        if self.chance(0.3):
            options["cpu"] = False
        if options["full"] and self.chance(0.3):
            options["broadcast"] = True
        return step("save", **options)

    def any_store(self) -> Step:
        """Load a new model from a checkpoint on disk, in some cases with differing replicas."""
        face, other = self.sharding.face, None
        if self.chance(0.5):
            other = sharding_of(self.draw, self.model, self.world, face)
        return step(
            "store",
            mode=self.draw.choice(("sync", "async")),
            differing=self.draw.choice(("", "", "weight", "bias", "seen")),
            optimizer=self.chance(0.7),
            other=other,
        )

    def any_load(self) -> Step:
        return step("load", factor=0.5, broadcast=self.chance(0.5))

    def any_mode(self) -> Step:
        return step("mode", training=self.chance(0.5))

    def any_move(self) -> Step:
        return step("move", way=self.draw.choice(("whole", "blocks", "modules")))

    def any_break(self) -> Step:
        return step("break_state", node=self.node(), load=self.chance(0.5))

    def any_tie(self) -> Step:
        return step("tie", pair=self.draw.randrange(1000), exchange=self.chance(0.3))

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
        """Call one of the methods that change the behaviour of units."""
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
