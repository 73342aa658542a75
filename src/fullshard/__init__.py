"""Fully sharded data parallelism: train PyTorch models that are too big for one device."""

from __future__ import annotations

from fullshard import errors
from fullshard.engine import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.frontend import FSDPModule, UnshardHandle, fully_shard
from fullshard.layout import PerParameter

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PerParameter",
    "UnshardHandle",
    "errors",
    "fully_shard",
]

__version__ = "0.1.0"
