"""Tests that need a newer PyTorch than the oldest that fullshard supports."""

from __future__ import annotations

import pytest
import torch

__all__ = ["TORCH", "asks_subclasses"]

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

asks_subclasses = pytest.mark.skipif(
    TORCH < (2, 12),
    reason="PyTorch's issue 177716: before 2.12 DTensor does not ask its subclasses",
)
