"""Run programs written for ``torch.distributed.fsdp`` on fullshard."""

from __future__ import annotations

from fullshard.compat.patch import Patch, patch_torch

__all__ = ["Patch", "patch_torch"]
