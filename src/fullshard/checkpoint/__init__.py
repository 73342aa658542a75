"""Checkpoints of models and optimizers on disk, and full and sharded state dicts.

``save`` writes ``safetensors`` files to a folder or an object store, whole or not at all; ``load``
reads them into a model of any layout on any number of ranks, verified; ``Checkpointer`` does both
in a training loop.

A full state dict holds plain tensors, by default on the first rank only; a sharded one holds
this rank's shards as DTensors. ``full_state_dict``, ``sharded_state_dict``, ``load_...`` and their
``optim`` counterparts make and load dictionaries. ``torch.distributed.checkpoint`` writes and
reads the sharded ones, too (load with ``LoadPlanner``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fullshard.checkpoint.conversion import convert, differences
from fullshard.checkpoint.format import (
    CheckpointInfo,
    ObjectUrl,
    TensorInfo,
    faults,
    inspect,
    latest,
    list_checkpoints,
    verify,
)
from fullshard.checkpoint.loading import load
from fullshard.checkpoint.manager import Checkpointer, load_newest
from fullshard.checkpoint.saving import PendingSave, save
from fullshard.checkpoint.state import (
    full_optim_state_dict,
    full_state_dict,
    load_full_optim_state_dict,
    load_full_state_dict,
    load_sharded_optim_state_dict,
    load_sharded_state_dict,
    sharded_optim_state_dict,
    sharded_state_dict,
)
from fullshard.checkpoint.weights import Conversion, LoadedWeights, load_weights, save_weights

if TYPE_CHECKING:
    from fullshard.checkpoint.dcp import LoadPlanner

__all__ = [
    "CheckpointInfo",
    "Checkpointer",
    "Conversion",
    "LoadPlanner",
    "LoadedWeights",
    "ObjectUrl",
    "PendingSave",
    "TensorInfo",
    "convert",
    "differences",
    "faults",
    "full_optim_state_dict",
    "full_state_dict",
    "inspect",
    "latest",
    "list_checkpoints",
    "load",
    "load_full_optim_state_dict",
    "load_full_state_dict",
    "load_newest",
    "load_sharded_optim_state_dict",
    "load_sharded_state_dict",
    "load_weights",
    "sharded_optim_state_dict",
    "save",
    "save_weights",
    "sharded_state_dict",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import ``LoadPlanner`` late: to import its base class takes 0.1 s."""
    if name == "LoadPlanner":
        from fullshard.checkpoint.dcp import LoadPlanner

        return LoadPlanner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
