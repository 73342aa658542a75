"""The cut of a RaggedTensor on a mesh of any dims, in integers.

    placements   Replicate   RaggedShard   Shard(1)   Replicate
                 replicas    data parallel   tensor parallel

The part that tensor parallelism gives to a rank, the *tp part*, is a box of the full tensor. The
ranks along the ragged mesh dim divide the tp part's elements, in row-major order, into intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard._torch import dtensor as _dtensor
from fullshard.errors import ConfigError
from fullshard.layout.region import Box, Interval, boxes
from fullshard.tensors.parts import chunk_of, coordinate_in
from fullshard.tensors.ragged_shard import RaggedShard


def is_ragged(value: object) -> bool:
    """Return whether ``value`` is a DTensor with a RaggedShard placement."""
    return isinstance(value, DTensor) and any(
        isinstance(placement, RaggedShard) for placement in value.placements
    )


def is_on_one_rank(placements: Sequence[Placement]) -> bool:
    """Return whether one rank of a mesh dim holds all intervals, as of state at its owner."""
    lengths = [one.lengths for one in placements if isinstance(one, RaggedShard)]
    return any(sum(count for count, length in own if length) == 1 for own in lengths)


@dataclass(frozen=True, slots=True)
class RaggedCut:
    """The position of a RaggedTensor's elements, as seen from one rank.

    Attributes:
        mesh_dim: the mesh dim along which intervals follow each other.
        tp_placements: placements of the tp part alone, one for each mesh dim.
        tp_shape: shape of the tp part, which is the full tensor without tensor parallelism.
        tp_offsets: offsets of the tp part in the full tensor.
        ragged: the placement along ``mesh_dim``.
        interval: elements of the tp part that this rank holds.
        is_first: True if the rank is the first on every mesh dim.
        is_first_copy: True if the rank is the first of the ranks with copies of one tp part.
    """

    mesh_dim: int
    tp_placements: tuple[Placement, ...]
    tp_shape: tuple[int, ...]
    tp_offsets: tuple[int, ...]
    ragged: RaggedShard
    interval: Interval
    is_first: bool
    is_first_copy: bool

    @property
    def has_tp(self) -> bool:
        """Return whether tensor parallelism cuts the tensor."""
        return any(isinstance(placement, Shard) for placement in self.tp_placements)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """This rank's elements as boxes of the full tensor, in the order of the interval."""
        return tuple(
            Box(tuple(map(add, box.offsets, self.tp_offsets)), box.sizes)
            for box in boxes(self.tp_shape, *self.interval)
        )

    def tp_part(self, whole: Tensor) -> Tensor:
        """Return a view of the tp part of ``whole``."""
        part = whole
        for dim, (start, length) in enumerate(zip(self.tp_offsets, self.tp_shape, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def own_part(self, tp_part: Tensor) -> Tensor:
        """Return this rank's interval of ``tp_part`` as a 1-D tensor."""
        return tp_part.reshape(-1)[self.interval.start : self.interval.stop]


def cut_of(tensor: DTensor) -> RaggedCut:
    """Return the cut of ``tensor``, as seen from this rank.

    Raises:
        ConfigError: if no RaggedTensor can have these placements, or this rank is not in the mesh.
    """
    mesh = tensor.device_mesh
    return _cut(tensor.placements, tuple(tensor.shape), tuple(mesh.shape), coordinate_in(mesh))


# Keyed by values, not by mesh: meshes that compare equal may have different process groups.
@lru_cache(maxsize=1 << 14)
def _cut(
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> RaggedCut:
    mesh_dim = _ragged_dim(placements)
    tp_shape, tp_offsets = list(shape), [0] * len(shape)
    is_first_copy = True
    for dim in range(mesh_dim + 1, len(placements)):
        placement = placements[dim]
        if isinstance(placement, Shard):
            held = chunk_of(tp_shape[placement.dim], mesh_shape[dim], coordinate[dim])
            tp_shape[placement.dim] = held.length
            tp_offsets[placement.dim] += held.start
        else:
            is_first_copy &= coordinate[dim] == 0
    ragged = placements[mesh_dim]
    assert isinstance(ragged, RaggedShard)
    numel = math.prod(tp_shape)
    if (ragged.num_ranks, ragged.numel) != (mesh_shape[mesh_dim], numel):
        raise ConfigError(
            f"RaggedTensor of shape {shape}: {ragged} on mesh dim {mesh_dim} cuts {ragged.numel} "
            f"elements for {ragged.num_ranks} ranks; expected a cut of the {numel} elements of "
            f"{tuple(tp_shape)}, this rank's tensor-parallel part, for {mesh_shape[mesh_dim]} ranks"
        )
    return RaggedCut(
        mesh_dim=mesh_dim,
        tp_placements=(*[Replicate()] * (mesh_dim + 1), *placements[mesh_dim + 1 :]),
        tp_shape=tuple(tp_shape),
        tp_offsets=tuple(tp_offsets),
        ragged=ragged,
        interval=ragged.interval(coordinate[mesh_dim]),
        is_first=not any(coordinate),
        is_first_copy=is_first_copy,
    )


def _is_box(placement: Placement) -> bool:
    return isinstance(placement, Shard) and not isinstance(placement, _dtensor.StridedShard)


def _ragged_dim(placements: Sequence[Placement]) -> int:
    """Return the mesh dim of the only RaggedShard.

    Raises:
        ConfigError: if there is not exactly one RaggedShard, or another placement does not fit it.
    """
    ragged = [dim for dim, one in enumerate(placements) if isinstance(one, RaggedShard)]
    first = ragged[0] if ragged else len(placements)
    is_right = len(ragged) == 1 and all(
        isinstance(one, Replicate) or (_is_box(one) and dim > first)
        for dim, one in enumerate(placements)
        if dim != first
    )
    if not is_right:
        raise ConfigError(
            f"RaggedTensor: got placements {tuple(placements)}; expected one RaggedShard, on mesh "
            "dims before it Replicate(), and after it Replicate() or Shard(d): move "
            "tensor-parallel mesh dims behind those of data parallelism"
        )
    return first
