"""Full and sharded state dicts of models and optimizers.

A full state dict holds whole plain tensors, by default on the first rank only; a sharded one holds
this rank's shards as DTensors. ``full_state_dict``, ``sharded_state_dict``, ``load_...`` and their
``optim`` counterparts make and load dictionaries. Save the sharded ones to files with
``torch.distributed.checkpoint`` (load with ``LoadPlanner``), the full ones as any dictionary.
"""

from __future__ import annotations

from fullshard.checkpoint.folders import CheckpointInfo, latest, list_checkpoints, verify
from fullshard.checkpoint.loading import load
from fullshard.checkpoint.model import (
    full_state_dict,
    load_full_state_dict,
    load_sharded_state_dict,
    sharded_state_dict,
)
from fullshard.checkpoint.optimizer import (
    full_optim_state_dict,
    load_full_optim_state_dict,
    load_sharded_optim_state_dict,
    sharded_optim_state_dict,
)
from fullshard.checkpoint.planner import LoadPlanner
from fullshard.checkpoint.saving import save

__all__ = [
    "CheckpointInfo",
    "LoadPlanner",
    "full_optim_state_dict",
    "full_state_dict",
    "latest",
    "list_checkpoints",
    "load",
    "load_full_optim_state_dict",
    "load_full_state_dict",
    "load_sharded_optim_state_dict",
    "load_sharded_state_dict",
    "sharded_optim_state_dict",
    "save",
    "sharded_state_dict",
    "verify",
]
