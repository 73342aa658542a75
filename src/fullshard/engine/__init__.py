"""DOES it: moves tensors as the scheduler says; knows no ``nn.Module``.

Read ``bucket`` first (its note names every tensor), then ``unshard`` and ``reduce`` (the two ways
through a bucket), ``unit``, ``autograd`` (how backward tells us where it is) and ``executor``.
"""

from __future__ import annotations

from fullshard.engine.bucket import Bucket
from fullshard.engine.executor import Engine
from fullshard.engine.extended import check_extendable
from fullshard.engine.offload import Offload
from fullshard.engine.policy import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReducePolicy,
)
from fullshard.engine.spec import BucketSpec
from fullshard.engine.unit import Registration, Unit

__all__ = [
    "Bucket",
    "BucketSpec",
    "CPUOffloadPolicy",
    "Engine",
    "MixedPrecisionPolicy",
    "Offload",
    "OffloadPolicy",
    "ReducePolicy",
    "Registration",
    "Unit",
    "check_extendable",
]
