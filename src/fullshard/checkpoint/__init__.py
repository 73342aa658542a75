"""State dicts: full ones on one rank, sharded ones on all, of models and of optimizers.

``model`` and ``optimizer`` have two pairs of functions each, to read and to load; ``tree`` says
which tensor has which name, ``source`` where values come from that are loaded. Files are written
and read by ``torch.distributed.checkpoint``, with the ``LoadPlanner``, or by what writes plain
dictionaries.
"""

from __future__ import annotations

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

__all__ = [
    "LoadPlanner",
    "full_optim_state_dict",
    "full_state_dict",
    "load_full_optim_state_dict",
    "load_full_state_dict",
    "load_sharded_optim_state_dict",
    "load_sharded_state_dict",
    "sharded_optim_state_dict",
    "sharded_state_dict",
]
