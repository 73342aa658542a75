"""Checkpoints of a run through ``torch.distributed.checkpoint``: complete, or not there.

Every worker writes its shards; the tensors' own metadata lets another number of workers read them.
There is no random state to keep: dropout and ``Order`` need the step alone.
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
    """Writes model and optimizer under a temporary name and gives it ``path``'s when complete."""
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
    """Reads ``path`` into model and optimizer, each worker its own shards.

    Parameters that had no gradient until then, such as experts nobody was sent to, have no state.
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
