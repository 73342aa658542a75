"""Host memory for copies to and from a device."""

from __future__ import annotations

import torch
from torch import Tensor


def host_tensor(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Return a 1-D CPU tensor; if pinned, copies to and from a device do not block the host."""
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, pin_memory=pinned)
