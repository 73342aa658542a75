"""Read a checkpoint into a model of any layout on any number of ranks."""

from __future__ import annotations

from fullshard.checkpoint.loading.loading import load, load_from
from fullshard.checkpoint.loading.read import Reader, WantedPart
