"""What is done between steps, on local tensors: optimizers, norms, loss scales.

They find out where parameters and gradients lie from the tensors themselves, and import no engine:
any DTensors will do.
"""

from __future__ import annotations

from fullshard.optim.clip import clip_grad_norm_, grad_norm
from fullshard.optim.grad_scaler import ShardedGradScaler
from fullshard.optim.sharded import ShardedOptimizer

__all__ = ["ShardedGradScaler", "ShardedOptimizer", "clip_grad_norm_", "grad_norm"]
