"""Makes a case from an integer, equal on every machine, in every run and on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from tests.fuzz.case import Case
from tests.fuzz.draw import draw_case
from tests.fuzz.program import draw_program

MAX_WORLD = 4

OPTIMIZERS: Sequence[tuple[str, dict[str, Any]]] = (
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    # A large eps keeps rounding differences of gradients near zero from becoming whole steps.
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
    """Return the number of ranks, which cycles through 1 to ``MAX_WORLD``."""
    return 1 + seed % MAX_WORLD


def generate(seed: int) -> Case:
    """Return the case of a seed."""
    draw = Random(seed)
    world = world_of(seed)
    face = draw.choice(("modules", "modules", "originals", "flat"))
    model, sharding = draw_case(draw, world, face)
    optimizer = _optimizer(draw, face)
    return Case(seed, world, model, sharding, optimizer, draw_program(draw, model, sharding, world))


def _optimizer(draw: Random, face: str) -> tuple[str, dict[str, Any]]:
    name, options = draw.choice(OPTIMIZERS)
    options = dict(options)
    if draw.random() < 0.3:
        options["foreach"] = draw.random() < 0.5
    if face != "flat" and draw.random() < 0.3:
        options["split"] = True
    return ("Sharded" + name if draw.random() < 0.5 else name), options
