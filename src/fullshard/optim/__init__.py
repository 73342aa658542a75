"""What optimizers do, on local tensors: ``ShardedOptimizer``, ``clip_grad_norm_``, ``grad_norm``.

They find out where parameters and gradients lie from the tensors themselves, and import no engine:
any DTensors will do.
"""

from __future__ import annotations

from fullshard.optim.clip import clip_grad_norm_, grad_norm
from fullshard.optim.sharded import ShardedOptimizer

__all__ = ["ShardedOptimizer", "clip_grad_norm_", "grad_norm"]
