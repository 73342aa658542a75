"""Trials on small tensors that show how an optimizer class treats its parameters."""

from __future__ import annotations

from fullshard.optim.probe.blocks import (
    BlockPiece,
    First,
    Recipe,
    Shape,
    Units,
    padded_numel,
    sample,
    units_of,
    uses_rng,
    widened,
)
from fullshard.optim.probe.elementwise import check_elementwise, refuse, scalar_keys, scalar_keys_of
from fullshard.optim.probe.independent import Traits, check_shapes, traits_of
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
    "BlockPiece",
    "Recipe",
    "Shape",
    "Traits",
    "Unchanged",
    "Units",
    "check_elementwise",
    "check_shapes",
    "uses_rng",
    "held_by",
    "keep_unchanged",
    "loaded",
    "padded_numel",
    "plain",
    "refuse",
    "replace",
    "sample",
    "scalar_keys",
    "scalar_keys_of",
    "tensors_for_numbers",
    "traits_of",
    "unheld",
    "units_of",
    "unwrapped",
    "widened",
    "wrapped",
]
