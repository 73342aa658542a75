"""The plan of a run: what its steps will take, by the model, options and loss of the run itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.plan import Plan, plan

from .architecture import Architecture
from .config import TrainConfig
from .loop import build_on_meta, label_losses, policy_of, shard_model


def plan_of(
    config: TrainConfig, architecture: Architecture, *, num_workers: int, **options: Any
) -> Plan:
    """Return the plan of a run of ``num_workers``; other options are those of ``fullshard.plan``.

    With ``budget_nbytes``, layout, copies and resharding are chosen, whatever ``config`` says.

    Raises:
        ConfigError: the model cannot be built, or an option does not fit.
        UnsupportedError: the model computes by values, see ``fullshard.plan``.
    """

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return label_losses(model, *batch).sum()

    def shard(model: nn.Module, mesh: DeviceMesh) -> None:
        shard_model(model, config, mesh)

    if options.get("budget_nbytes") is None:
        options["mesh"] = {"replicate": config.replicas, "shard": num_workers // config.replicas}
        options["shard"] = shard
    else:
        options |= {"world_size": num_workers, "mp_policy": policy_of(config)}
    tokens = torch.zeros(config.batch, config.seq, dtype=torch.long, device="meta")
    return plan(
        build_on_meta(config, architecture),
        batch=(tokens, tokens),
        loss=loss,
        accumulate=config.accumulate,
        reduces_once=True,
        **options,
    )
