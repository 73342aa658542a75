"""The optimizer of a run, and its learning rates."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from fullshard.optim import Muon, ShardedOptimizer
from fullshard.train.config import LrSchedule, OptimizerName, TrainConfig

_DECAY = 0.2  # share of all steps in which ``LrSchedule.WSD`` decays, at the end


def build_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Return the optimizer of the sharded parameters, without decay for norms and other vectors."""
    adamw: dict[str, Any] = {"lr": config.lr, "betas": config.adam_betas, "fused": True}
    if config.optimizer is OptimizerName.MUON:
        return Muon(
            model,
            lr=config.muon_peak_lr,
            adamw={**adamw, "weight_decay": config.weight_decay},
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",  # so that learning rates of AdamW suit matrices
            rule=lambda name, info: {"weight_decay": 0.0} if len(info.shape) < 2 else None,
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [one for one in trained if one.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # adapters are all matrices
    return ShardedOptimizer(groups, AdamW, **adamw)


def set_options(optimizer: Optimizer, config: TrainConfig) -> None:
    """Give an optimizer the options of this start, not those of the loaded checkpoint."""
    for group in optimizer.param_groups:
        if "betas" in group:
            group["betas"] = config.adam_betas
        if any(param.dim() >= 2 for param in group["params"]):
            group["weight_decay"] = config.weight_decay


def set_learning_rate(optimizer: Optimizer, step: int, config: TrainConfig) -> float:
    """Set the learning rates of ``step`` (from 1), and return that of AdamW."""
    lr = learning_rate(step, config)
    for group in optimizer.param_groups:
        is_muon = group.get("algorithm") == "muon"
        group["lr"] = lr * (config.muon_peak_lr / config.lr) if is_muon else lr
    return lr


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of ``step`` (from 1): linear warm-up, then ``lr_schedule``."""
    warmup = _warmup(config)
    if step <= warmup:
        return config.lr * step / warmup
    first = _stable_until(config) if config.lr_schedule is LrSchedule.WSD else warmup
    done = max(0.0, (step - first) / max(1, config.steps - first))
    return config.lr * (config.lr_floor + (1 - config.lr_floor) * _left(config.lr_schedule, done))


def described(config: TrainConfig) -> str:
    """Describe the course of the learning rate over the run, in words."""
    peak, end = f"{config.lr:g}", f"{config.lr * config.lr_floor:g}"
    warmup = _warmup(config)
    rises = f"rises to {peak} over {warmup} {'step' if warmup == 1 else 'steps'}"
    rises = rises if warmup else f"begins at {peak}"
    return {
        LrSchedule.COSINE: f"{rises}, then falls to {end} along a cosine",
        LrSchedule.LINEAR: f"{rises}, then falls to {end} in a line",
        LrSchedule.CONSTANT: f"{rises}, then stays",
        LrSchedule.WSD: f"{rises}, stays to step {_stable_until(config)}, then falls to {end} in a "
        "line",
    }[config.lr_schedule]


def _warmup(config: TrainConfig) -> int:
    """Return the number of steps of the warm-up: at most a tenth of all."""
    return min(config.warmup, max(1, config.steps // 10))


def _stable_until(config: TrainConfig) -> int:
    """Return the last step of the peak learning rate of ``LrSchedule.WSD``."""
    return max(_warmup(config), config.steps - round(_DECAY * config.steps))


def _left(schedule: LrSchedule, done: float) -> float:
    """Return the share of peak minus floor that remains, after a share ``done`` of the decay."""
    if schedule is LrSchedule.CONSTANT:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * done)) if schedule is LrSchedule.COSINE else 1 - done
