"""Trials on small tensors that show how an optimizer class treats its parameters."""

from __future__ import annotations

from fullshard.optim.probe.blocks import (
    First,
    GrainPiece,
    Recipe,
    Shape,
    Units,
    padded_numel,
    sample,
    units_of,
    widened,
)
from fullshard.optim.probe.elementwise import check_elementwise, refuse, single_keys, singles_of
from fullshard.optim.probe.independent import Traits, check_shapes, traits_of
from fullshard.optim.probe.seeds import SEED, advance, check_draws, draws_random_numbers, seeded
from fullshard.optim.probe.subclasses import (
    Unchanged,
    held_by,
    keep_unchanged,
    loaded,
    plain,
    replace,
    tensors_for_numbers,
    unheld,
    unwrapped,
    wrapped,
)

__all__ = [
    "First",
    "GrainPiece",
    "Recipe",
    "SEED",
    "Shape",
    "Traits",
    "Unchanged",
    "Units",
    "advance",
    "check_draws",
    "check_elementwise",
    "check_shapes",
    "draws_random_numbers",
    "held_by",
    "keep_unchanged",
    "loaded",
    "padded_numel",
    "plain",
    "refuse",
    "replace",
    "sample",
    "seeded",
    "single_keys",
    "singles_of",
    "tensors_for_numbers",
    "traits_of",
    "unheld",
    "units_of",
    "unwrapped",
    "widened",
    "wrapped",
]
