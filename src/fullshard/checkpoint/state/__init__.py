"""Rows of a model's and an optimizer's state, and the state dicts made from them."""

from __future__ import annotations

from fullshard.checkpoint.state.agreement import Item, singles_of
from fullshard.checkpoint.state.model import (
    full_state_dict,
    load_full_state_dict,
    load_into,
    load_sharded_state_dict,
    sharded_state_dict,
)
from fullshard.checkpoint.state.optimized import Stepped
from fullshard.checkpoint.state.optimizer import (
    OptimStateToLoad,
    full_optim_state,
    full_optim_state_dict,
    load_full_optim_state_dict,
    load_sharded_optim_state_dict,
    optim_state_to_load,
    sharded_optim_state,
    sharded_optim_state_dict,
)
from fullshard.checkpoint.state.rows import (
    EXTRA_STATE,
    Announced,
    Key,
    Row,
    Tree,
    part_here,
    sharded,
)
