"""Memory of the host that a device copies from and to."""

from __future__ import annotations

import torch
from torch import Tensor


def host_tensor(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """A 1-D tensor on the CPU; pinned, a device copies from and to it while the host goes on."""
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, pin_memory=pinned)
