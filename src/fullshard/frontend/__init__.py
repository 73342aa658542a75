"""torch.nn faces of the engine.

``ownership`` says which parameters a call owns, ``places`` where they stand, ``checks`` what it
refuses, ``meshes`` and ``placement`` over which ranks they are cut, ``buckets`` how they lie
together; ``build`` makes the unit, ``blocks`` chooses units, ``hooks`` drive the engine;
``sharded`` is what every sharded module does, ``module`` what users call after ``fully_shard``,
with ``controls`` of how it communicates and ``finalization`` of backwards; ``copying`` makes deep
copies, ``contexts`` lends full parameters, ``pending`` shows gradients that wait, ``flat_param``
one parameter for a whole unit; ``explain`` puts torch's errors into our words.
"""

from __future__ import annotations

from fullshard.frontend.blocks import ChosenUnit, ChosenUnits, shard_blocks
from fullshard.frontend.contexts import iter_full_params, unshard_params
from fullshard.frontend.controls import share_comm_ctx
from fullshard.frontend.finalization import GradientReductionHandle
from fullshard.frontend.fully_shard import fully_shard
from fullshard.frontend.meshes import DataParallelMeshDims
from fullshard.frontend.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
)
from fullshard.frontend.placement import ShardPlacementResult

__all__ = [
    "ChosenUnit",
    "ChosenUnits",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "ShardPlacementResult",
    "UnshardHandle",
    "fully_shard",
    "iter_full_params",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "shard_blocks",
    "unshard_params",
]
