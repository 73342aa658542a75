"""What users hold between steps, and how tensors are found in what a module takes and returns."""

from __future__ import annotations

from fullshard.tensors.flats import FlatPart, announce_flat, flat_part_of
from fullshard.tensors.form import DTensorForm, ShardForm, local_part, shown_like
from fullshard.tensors.ragged_shard import RaggedShard
from fullshard.tensors.ragged_tensor import RaggedTensor
from fullshard.tensors.random import draw_whole_on
from fullshard.tensors.tree import find_tensors, map_tensors

__all__ = [
    "DTensorForm",
    "FlatPart",
    "RaggedShard",
    "RaggedTensor",
    "ShardForm",
    "announce_flat",
    "draw_whole_on",
    "find_tensors",
    "flat_part_of",
    "local_part",
    "map_tensors",
    "shown_like",
]
