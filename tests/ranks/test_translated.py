"""Programs written by ``fullshard translate`` train as the unsharded model does."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.cli.translating import translated
from tests.ranks.pool import on_ranks

ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.1}}
PLAIN: dict[str, Any] = {
    "optimizer": ADAMW,
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    "budgets": {
        "zero_optimization": {"stage3_prefetch_bucket_size": 100, "reduce_bucket_size": 100}
    },
    "copies": {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
    "hpz": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
    "offload": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    "state": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    "activations": {"activation_checkpointing": {"cpu_checkpointing": True}},
}


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))).double()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("name", CONFIGS)
@on_ranks(4)
def test_a_program_trains_as_the_unsharded_model(name: str) -> None:
    program: dict[str, Any] = {}
    code = translated(PLAIN | CONFIGS[name], name)
    assert "get_world_size" not in code  # in a program of its own, no process group exists before
    exec(code, program)
    model, whole = made(), made()
    torch.manual_seed(1)
    batches = torch.randn(4, dist.get_world_size(), 2, 8, dtype=torch.float64)
    with mock.patch.dict(os.environ, WORLD_SIZE=str(dist.get_world_size())):
        program["train"](model, batches[:, dist.get_rank()], loss_of)

    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    for first in (0, 2):
        for batch in batches[first : first + 2]:
            (loss_of(whole, batch.flatten(0, 1)) / 2).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for own, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor(), expected.detach(), rtol=1e-12, atol=1e-12)
