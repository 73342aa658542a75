"""The optimizer of a run, and its learning rates."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from fullshard.optim import Muon, ShardedOptimizer

from .config import OptimizerName, TrainConfig

_BETAS = (0.9, 0.95)


def build_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Return the optimizer of the sharded parameters, without decay for norms and other vectors."""
    adamw: dict[str, Any] = {"lr": config.lr, "betas": _BETAS, "fused": True}
    if config.optimizer is OptimizerName.MUON:
        return Muon(
            model,
            lr=config.muon_peak_lr,
            adamw={**adamw, "weight_decay": config.weight_decay},
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",  # so that learning rates of AdamW do for matrices, too
            rule=lambda name, info: {"weight_decay": 0.0} if len(info.shape) < 2 else None,
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    vectors = [parameter for parameter in trained if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # adapters are all matrices
    return ShardedOptimizer(groups, AdamW, **adamw)


def set_learning_rate(optimizer: Optimizer, step: int, config: TrainConfig) -> float:
    """Set the learning rates of ``step`` (from 1), and return that of AdamW."""
    lr = learning_rate(step, config)
    for group in optimizer.param_groups:
        is_muon = group.get("algorithm") == "muon"
        group["lr"] = lr * (config.muon_peak_lr / config.lr) if is_muon else lr
    return lr


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of ``step`` (from 1): linear warm-up, then cosine to ``lr_floor``.

    The warm-up takes at most a tenth of the steps.
    """
    warmup = min(config.warmup, max(1, config.steps // 10))
    if step <= warmup:
        return config.lr * step / warmup
    done = (step - warmup) / max(1, config.steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.lr_floor + (1 - config.lr_floor) * cosine)
