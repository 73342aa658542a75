"""The tensors that users hold between steps: DTensors, ragged tensors, local shards."""

from __future__ import annotations

from fullshard.tensors.annotated import is_annotated, unchecked
from fullshard.tensors.dtensor_ops import handle_mixed_lists, handle_ops_on
from fullshard.tensors.extension import (
    HookArguments,
    carry_attributes,
    gathered_by_itself,
    is_wrapper,
    plain,
    post_all_gather,
    pre_all_gather,
    releases_outputs,
)
from fullshard.tensors.flats import cut_flat, flat_part_of, flat_starts
from fullshard.tensors.form import (
    AbsentParameter,
    Face,
    PlacedPiece,
    Shown,
    announce_pieces,
    local_part,
    local_parts,
    placed_pieces_of,
    shown_like,
)
from fullshard.tensors.full import on_larger_mesh, plainly_sharded, taken_by
from fullshard.tensors.parallel import (
    ParallelSpec,
    ShardPlace,
    parallel_spec_of,
    shard_place,
)
from fullshard.tensors.parallel_grads import local_gradients
from fullshard.tensors.parallel_mesh import SpmdMesh, names_of
from fullshard.tensors.parts import Sharding, coordinates_near, region_of, sharding_of
from fullshard.tensors.ragged_cut import is_on_one_rank, is_ragged
from fullshard.tensors.ragged_shard import RaggedShard
from fullshard.tensors.ragged_tensor import RaggedTensor
from fullshard.tensors.tree import find_tensors, map_tensors
from fullshard.tensors.uses import MIXED, explain_uses, explanations
