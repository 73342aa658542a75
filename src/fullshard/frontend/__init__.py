"""``fully_shard`` and the methods that sharding adds to modules.

``ownership`` finds the parameters of a call and ``places`` their places in modules. ``checks``
refuses wrong arguments, ``meshes`` and ``placement`` choose the ranks of each cut, ``buckets``
groups parameters. ``build`` makes the unit, ``blocks`` chooses units, ``activations`` recomputes
blocks in backward, ``hooks`` drive the engine. ``sharded`` is the base class of sharded modules.
``module`` adds the methods for users, with ``controls`` for communication and ``finalization`` for
the end of backwards. ``copying`` makes deep copies, ``contexts`` lends full parameters,
``flat_param`` shows one parameter for all of a unit. ``explain`` rewords torch's errors.
"""

from __future__ import annotations

from fullshard.frontend.activations import checkpoint_blocks
from fullshard.frontend.blocks import (
    CHOSEN,
    Choice,
    ChosenUnit,
    ChosenUnits,
    num_blocks,
    shard_blocks,
)
from fullshard.frontend.contexts import iter_full_params, unshard_params
from fullshard.frontend.controls import share_comm_ctx
from fullshard.frontend.finalization import GradientReductionHandle
from fullshard.frontend.fully_shard import ShardPlacementResult, fully_shard
from fullshard.frontend.meshes import DataParallelMeshDims
from fullshard.frontend.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
)
