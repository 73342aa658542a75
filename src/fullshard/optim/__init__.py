"""What optimizers do, on local tensors: ``clip_grad_norm_`` and ``grad_norm``.

They find out where gradients lie from the tensors themselves, and import no engine: any DTensors
will do.
"""

from __future__ import annotations

from fullshard.optim.clip import clip_grad_norm_, grad_norm

__all__ = ["clip_grad_norm_", "grad_norm"]
