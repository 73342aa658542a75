"""Tensors in one buffer, as in a unit, but without a unit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fullshard.tensors import cut_flat

__all__ = ["NUMELS", "SHAPES", "neighbours", "parameters"]

SHAPES = ((2, 3), (4,), (1,), (3, 2))
NUMELS = tuple(math.prod(shape) for shape in SHAPES)


def neighbours(seed: int, starts: Sequence[int] = (0, 8, 12, 16)) -> list[Tensor]:
    """Return tensors of ``SHAPES`` that share a buffer, with NaN between them."""
    flat = torch.full((24,), math.nan, dtype=torch.float64)
    parts = cut_flat(flat, zip(starts, SHAPES, strict=True))
    for number, part in enumerate(parts):
        values = torch.arange(part.numel(), dtype=torch.float64).view(part.shape)
        part.copy_(torch.sin(values + seed + 10 * number))
    return parts


def parameters(parts: Sequence[Tensor]) -> list[nn.Parameter]:
    """Return parameters over ``parts``, which keep their tensors alive."""
    made = [nn.Parameter(part) for part in parts]
    for param, part in zip(made, parts, strict=True):
        param.part = part
    return made
