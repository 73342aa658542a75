"""Optimizers, gradient norms and loss scaling on local tensors.

This room reads the memory layout of parameters and gradients from the tensors themselves and
imports no engine, so any DTensors work.
"""

from __future__ import annotations

from fullshard.optim.clip import clip_grad_norm_, grad_norm
from fullshard.optim.flat import ShardedOptimizer
from fullshard.optim.grad_scaler import ShardedGradScaler
from fullshard.optim.guard import StepGuard
from fullshard.optim.muon import Muon
from fullshard.optim.owned import OwnedOptimizer

__all__ = [
    "Muon",
    "OwnedOptimizer",
    "ShardedGradScaler",
    "ShardedOptimizer",
    "StepGuard",
    "clip_grad_norm_",
    "grad_norm",
]
