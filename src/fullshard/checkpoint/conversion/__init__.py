"""Checkpoints of PyTorch as ours and back, and differences between checkpoints."""

from __future__ import annotations

from fullshard.checkpoint.conversion.compare import differences
from fullshard.checkpoint.conversion.converting import convert
