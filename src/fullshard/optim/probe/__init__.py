"""Trials on small tensors that show how an optimizer class treats its parameters."""

from __future__ import annotations

from fullshard.optim.probe.blocks import (
    BlockPiece,
    First,
    Units,
    padded_numel,
    units_of,
    widened,
)
from fullshard.optim.probe.probe import Probe, Shape, Traits, scalar_keys_of
from fullshard.optim.probe.subclasses import (
    Unchanged,
    held_by,
    keep_unchanged,
    loaded,
    plain,
    replace,
    unheld,
    unwrapped,
    wrapped,
)
