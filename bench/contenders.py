"""The contenders: ways to shard a GPT, each with its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fullshard
from bench.models import Block

FLAT = "flat, original parameters"
FSDP1 = "torch FSDP1"
FSDP2 = "torch FSDP2"
ONE_FLAT = "one flat parameter"
PER_PARAMETER = "per-parameter"
RAGGED = "ragged, ShardedOptimizer"


@dataclass(frozen=True)
class Contender:
    """``prepare`` shards a model in place or wraps it; ``optimizer`` takes its parameters."""

    prepare: Callable[[nn.Module], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]

    def make(self, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model to train and its optimizer."""
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


def wrapped(
    wrapper: Any, blocks: Iterable[type[nn.Module]] = (Block,), **options: Any
) -> Callable[[nn.Module], nn.Module]:
    """The same units, by FSDP1's wrapper or ours."""
    policy = ModuleWrapPolicy(blocks)
    return partial(wrapper, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


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
    FSDP1: Contender(wrapped(FullyShardedDataParallel, use_orig_params=True), adamw),
    "torch FSDP1, one flat parameter": Contender(wrapped(FullyShardedDataParallel), adamw),
    FSDP2: Contender(units(torch_fully_shard), adamw),
    "torch FSDP2, fused": Contender(units(torch_fully_shard), fused_adamw),
    PER_PARAMETER: Contender(ours, adamw),
    "per-parameter, ShardedOptimizer": Contender(ours, sharded_adamw),
    RAGGED: Contender(ours_ragged, sharded_adamw),
    "ragged, ShardedOptimizer, fused": Contender(ours_ragged, sharded_fused_adamw),
    FLAT: Contender(wrapped(fullshard.FullyShardedDataParallel, use_orig_params=True), adamw),
    ONE_FLAT: Contender(wrapped(fullshard.FullyShardedDataParallel), adamw),
}

WIRES = {
    text: Contender(
        units(
            fullshard.fully_shard,
            layout=fullshard.Ragged(),
            wire=fullshard.WirePolicy.parse(text),
        ),
        sharded_adamw,
    )
    for text in (
        "reduce=bf16",
        "gather=int8",
        "gather=int8,reduce=bf16",
        "gather=int8,reduce=int8",
    )
}
"""Ragged shards, by how parameters and gradients travel."""
