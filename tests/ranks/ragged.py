"""RaggedTensors built by hand on meshes of several dims, with different cuts per tp coordinate."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fullshard import RaggedTensor
from fullshard._torch import dtensor as _dtensor
from fullshard.tensors import RaggedShard
from tests.versions import TORCH

__all__ = [
    "CASES",
    "CUT",
    "SHAPES",
    "Case",
    "cut_lengths",
    "dtensor",
    "numel_of",
    "param_of",
    "placed",
    "ragged",
    "strided",
    "whole_of",
]

CUT = None  # in a case's placements, the place of the RaggedShard


class Case(NamedTuple):
    """A mesh of four ranks and the placement on each of its dims."""

    mesh_shape: tuple[int, ...]
    placements: tuple[Placement | None, ...]

    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", self.mesh_shape)


CASES: dict[str, Case] = {
    "1d": Case((4,), (CUT,)),
    "hsdp": Case((2, 2), (Replicate(), CUT)),
    "replicas_only": Case((4, 1), (Replicate(), CUT)),
    "rows": Case((2, 2), (CUT, Shard(0))),
    "columns": Case((2, 2), (CUT, Shard(1))),
    "many_columns": Case((1, 4), (CUT, Shard(1))),
    "copies": Case((2, 2), (CUT, Replicate())),
    "hsdp_tp": Case((2, 1, 2), (Replicate(), CUT, Shard(0))),
    "two_tp": Case((1, 2, 2), (CUT, Shard(0), Shard(1))),
    "same_dim_twice": Case((1, 1, 2, 2), (Replicate(), CUT, Shard(0), Shard(0))),
    "copies_and_columns": Case((1, 1, 2, 2), (Replicate(), CUT, Replicate(), Shard(1))),
}

SHAPES = [(5, 3), (1, 7), (3, 2, 5), (0, 3), (2, 2)]  # uneven on every mesh, or smaller than it


def cut_lengths(numel: int, num_ranks: int, seed: int) -> list[int]:
    """Return the number of elements of each rank; many are 0."""
    chance = random.Random(seed)
    cuts = sorted(chance.randint(0, numel) for _ in range(num_ranks - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, numel], strict=True)]


def ragged(
    whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement | None], seed: int = 0
) -> RaggedTensor:
    """Return ``whole`` as a RaggedTensor; PyTorch's DTensor shards it over tensor-parallel dims."""
    dim = list(placements).index(CUT)
    plain = [Replicate() if one is CUT else one for one in placements]
    part = distribute_tensor(whole.detach(), mesh, plain, src_data_rank=None).to_local()
    coordinate: Any = mesh.get_coordinate()
    seed = hash((seed, *coordinate[dim + 1 :]))
    lengths = cut_lengths(part.numel(), mesh.size(dim), seed)
    start = sum(lengths[: coordinate[dim]])
    local = part.reshape(-1)[start : start + lengths[coordinate[dim]]].clone()
    cut = RaggedShard((1, length) for length in lengths)
    spec = _dtensor.dtensor_spec(
        mesh,
        tuple(cut if one is CUT else one for one in placements),
        shape=whole.shape,
        stride=torch.empty(whole.shape, device="meta").stride(),
        dtype=whole.dtype,
    )
    return _dtensor.dtensor_from_spec(local, spec, requires_grad=False, cls=RaggedTensor)


def dtensor(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return ``whole`` as an ordinary DTensor, without communication.

    PyTorch's own scatter fails an assertion for an uneven ``_StridedShard``.
    """
    return distribute_tensor(whole.detach().clone(), mesh, placements, src_data_rank=None)


def strided(dim: int, factor: int) -> Placement:
    return _StridedShard(dim, split_factor=factor)


def whole_of(tensor: Any) -> Any:
    """Return the full tensor of a DTensor of all ranks, or ``tensor`` itself if it is no DTensor.

    Before 2.13, PyTorch gathers strided shards only if the other placements are cut the same way.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    is_strided = any(isinstance(one, _StridedShard) for one in tensor.placements)
    if TORCH >= (2, 13) or not is_strided:
        return tensor.full_tensor()
    numbers = torch.arange(tensor.numel()).view(tensor.shape)
    own = dtensor(numbers, tensor.device_mesh, tensor.placements).to_local(), tensor.to_local()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [part.detach().flatten() for part in own])
    whole = tensor.to_local().new_empty(tensor.numel())
    for number, values in parts:
        whole[number] = values
    return whole.view(tensor.shape)


def placed(
    whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement | None], seed: int = 0
) -> DTensor:
    if CUT in placements:
        return ragged(whole, mesh, placements, seed)
    return dtensor(whole, mesh, [one for one in placements if one is not None])


def param_of(value: Tensor, grad: Tensor | None = None) -> nn.Parameter:
    param = nn.Parameter(value)
    param.grad = grad
    return param


def numel_of(sizes: Sequence[int]) -> int:
    return math.prod(sizes)
