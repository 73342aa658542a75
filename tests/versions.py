"""Tests that need a newer PyTorch than the oldest that fullshard supports."""

from __future__ import annotations

import pytest
import torch

__all__ = [
    "INTEGER_PARAMETERS",
    "TORCH",
    "asks_subclasses",
    "mended_in_fsdp2",
    "new_in_fsdp2",
]

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

asks_subclasses = pytest.mark.skipif(
    TORCH < (2, 12),
    reason="PyTorch's issue 177716: before 2.12 DTensor does not ask its subclasses",
)
new_in_fsdp2 = pytest.mark.skipif(
    TORCH < (2, 13), reason="PyTorch 2.11's FSDP2 lacks the compared feature"
)
mended_in_fsdp2 = pytest.mark.skipif(
    TORCH < (2, 13), reason="PyTorch 2.11's FSDP2 fails in the compared feature"
)

INTEGER_PARAMETERS = TORCH >= (2, 13)
"""True if PyTorch's FSDP2 accepts parameters that cannot have gradients."""
