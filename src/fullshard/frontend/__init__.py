"""``fully_shard`` and the methods that sharding adds to modules.

``ownership`` finds the parameters of a call, ``places`` has the parameters that modules show.
``checks`` refuses wrong arguments, ``meshes`` chooses the ranks of each cut, ``fully_shard`` groups
parameters and makes the unit. ``blocks`` chooses units, and recomputes blocks in backward.
``hooks`` drive the engine. ``sharded`` is the base class of sharded modules. ``module`` adds the
methods for users, with ``controls`` for communication. ``contexts`` lends full parameters.
``optimizers`` refuses parameters that would not be trained, ``explain`` rewords torch's errors.
"""

from __future__ import annotations

from fullshard.frontend.blocks import (
    CHOSEN,
    Choice,
    ChosenUnit,
    ChosenUnits,
    checkpoint_blocks,
    num_blocks,
    shard_blocks,
)
from fullshard.frontend.contexts import iter_full_params, unshard_params
from fullshard.frontend.controls import share_comm_ctx
from fullshard.frontend.fully_shard import ShardPlacementResult, fully_shard
from fullshard.frontend.meshes import DataParallelMeshDims
from fullshard.frontend.module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    register_fsdp_forward_method,
)
