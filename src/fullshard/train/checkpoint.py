"""Checkpoints of a run, complete or absent, through ``torch.distributed.checkpoint``.

Every worker writes its shards; metadata of the tensors lets any number of workers read them. There
is no random state to save: dropout and ``Order`` depend only on configuration, step and rank.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from fullshard.checkpoint import LoadPlanner

from .rundir import CheckpointInfo, write_info
from .world import World


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: Optimizer, info: CheckpointInfo, world: World
) -> None:
    """Write model and optimizer under a temporary name, renamed to ``path`` when complete."""
    unfinished = path.with_name("unfinished-" + path.name)
    if world.is_first:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    world.barrier()
    save(_state(model, optimizer), checkpoint_id=unfinished)
    if world.is_first:
        write_info(unfinished, info)
        unfinished.rename(path)
    world.barrier()


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load ``path`` into model and optimizer; each worker reads its own shards.

    Parameters without a gradient so far, such as experts that received no token, have no state.
    """
    state = _state(model, optimizer)
    load(state, checkpoint_id=path, planner=LoadPlanner())
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=False),
    )


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}
