"""What users hold between steps, and how tensors are found in what a module takes and returns."""

from __future__ import annotations

from fullshard.tensors.form import DTensorForm, LocalForm, ShardForm
from fullshard.tensors.random import draw_whole_on
from fullshard.tensors.tree import find_tensors, map_tensors

__all__ = ["DTensorForm", "LocalForm", "ShardForm", "draw_whole_on", "find_tensors", "map_tensors"]
