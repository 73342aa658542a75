"""Who takes part in the benchmarks: ways to shard a GPT, each with its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fullshard
from bench.models import Block

__all__ = ["CONTENDERS", "FSDP2", "PER_PARAMETER", "RAGGED", "Contender"]

FSDP2 = "torch FSDP2"
PER_PARAMETER = "per-parameter"
RAGGED = "ragged, ShardedOptimizer"


@dataclass(frozen=True)
class Contender:
    """``prepare`` shards a model in place or wraps it; ``optimizer`` takes its parameters."""

    prepare: Callable[[nn.Module], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]

    def make(self, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model to train, and what trains it."""
        model = self.prepare(model)
        return model, self.optimizer(model.parameters())


def units(shard: Callable[..., Any], **options: Any) -> Callable[[nn.Module], nn.Module]:
    """Blocks and root, one unit each."""

    def prepare(model: nn.Module) -> nn.Module:
        for block in model.blocks:  # type: ignore[union-attr]
            shard(block, **options)
        shard(model, **options)
        return model

    return prepare


def flat(model: nn.Module) -> nn.Module:
    """PyTorch's FSDP1 with the same units."""
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def adamw(params: Any) -> torch.optim.Optimizer:
    """The default AdamW: on a CPU one parameter after the other."""
    return torch.optim.AdamW(params, lr=1e-3)


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    """One kernel a parameter."""
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def sharded_adamw(params: Any) -> torch.optim.Optimizer:
    """The default AdamW, on runs of neighbours."""
    return fullshard.optim.ShardedOptimizer(params, torch.optim.AdamW, lr=1e-3)


def sharded_fused_adamw(params: Any) -> torch.optim.Optimizer:
    """The fused AdamW, on runs of neighbours."""
    return fullshard.optim.ShardedOptimizer(params, torch.optim.AdamW, lr=1e-3, fused=True)


ours = units(fullshard.fully_shard)
ours_ragged = units(fullshard.fully_shard, layout=fullshard.Ragged())

CONTENDERS = {
    "unsharded": Contender(lambda model: model, adamw),
    "DDP": Contender(DistributedDataParallel, adamw),
    "torch FSDP1": Contender(flat, adamw),
    FSDP2: Contender(units(torch_fully_shard), adamw),
    "torch FSDP2, fused": Contender(units(torch_fully_shard), fused_adamw),
    PER_PARAMETER: Contender(ours, adamw),
    "per-parameter, ShardedOptimizer": Contender(ours, sharded_adamw),
    RAGGED: Contender(ours_ragged, sharded_adamw),
    "ragged, ShardedOptimizer, fused": Contender(ours_ragged, sharded_fused_adamw),
}
