"""The plan of a run: what its steps will take, by the model, options and loss of the run itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fullshard.plan import Hardware, Plan, plan

from .architecture import Architecture
from .config import TrainConfig
from .loop import build_on_meta, label_losses, shard_model


def plan_of(
    config: TrainConfig,
    architecture: Architecture,
    *,
    num_workers: int,
    hardware: Hardware | str,
    rank: int = 0,
) -> Plan:
    """Return the plan of a run of ``num_workers``.

    Raises:
        ConfigError: the model cannot be built, or ``hardware`` is not known.
        UnsupportedError: the model computes by values, see ``fullshard.plan``.
    """

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return label_losses(model, *batch).sum()

    tokens = torch.zeros(config.batch, config.seq, dtype=torch.long, device="meta")
    return plan(
        build_on_meta(config, architecture),
        batch=(tokens, tokens),
        mesh={"replicate": config.replicas, "shard": num_workers // config.replicas},
        hardware=hardware,
        shard=lambda model, mesh: shard_model(model, config, mesh),
        loss=loss,
        accumulate=config.accumulate,
        reduces_once=True,
        rank=rank,
    )
