"""The cut of a RaggedTensor on a mesh of any dims, in integers.

    placements   Replicate   RaggedShard   Shard(1)   Replicate
                 replicas    data parallel   tensor parallel

The part that tensor parallelism gives to a rank, the *tp part*, is a box of the full tensor. The
ranks along the ragged mesh dim divide the tp part's elements, in row-major order, into intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard._torch import dtensor as _dtensor
from fullshard.errors import ConfigError
from fullshard.layout.region import Box, Interval, Region
from fullshard.tensors.parts import coordinate_in, region_of
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
        ragged: the placement along ``mesh_dim``.
        region: this rank's elements; the grid of the region is the tp part, which is
            the full tensor without tensor parallelism.
        tp_placements: placements of the tp part alone, one for each mesh dim.
        is_first: True if the rank is the first on every mesh dim.
        is_first_copy: True if the rank is the first of the ranks with copies of one tp part.
    """

    mesh_dim: int
    ragged: RaggedShard
    region: Region
    tp_placements: tuple[Placement, ...]
    is_first: bool
    is_first_copy: bool

    @property
    def interval(self) -> Interval:
        """Elements of the tp part that this rank holds."""
        return Interval(self.region.start, self.region.numel)

    @property
    def has_tp(self) -> bool:
        """Return whether tensor parallelism cuts the tensor."""
        return any(isinstance(placement, Shard) for placement in self.tp_placements)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """This rank's elements as boxes of the full tensor, in the order of the interval."""
        return tuple(
            Box(tuple(one.start for one in box), tuple(one.length for one in box))
            for box in self.region.boxes()
        )

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
    ragged = placements[mesh_dim]
    assert isinstance(ragged, RaggedShard)
    tp_placements = (*[Replicate()] * (mesh_dim + 1), *placements[mesh_dim + 1 :])
    tp_part = region_of(shape, tp_placements, mesh_shape, coordinate)
    if (ragged.num_ranks, ragged.numel) != (mesh_shape[mesh_dim], tp_part.numel):
        raise ConfigError(
            f"RaggedTensor of shape {shape}: {ragged} on mesh dim {mesh_dim} cuts {ragged.numel} "
            f"elements for {ragged.num_ranks} ranks; expected a cut of the {tp_part.numel} "
            f"elements of {tp_part.grid}, this rank's tensor-parallel part, for "
            f"{mesh_shape[mesh_dim]} ranks"
        )
    own = ragged.interval(coordinate[mesh_dim])
    copies = zip(tp_placements[mesh_dim + 1 :], coordinate[mesh_dim + 1 :], strict=True)
    return RaggedCut(
        mesh_dim=mesh_dim,
        ragged=ragged,
        region=tp_part.part(own.start, own.stop),
        tp_placements=tp_placements,
        is_first=not any(coordinate),
        is_first_copy=not any(at for one, at in copies if not isinstance(one, Shard)),
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
