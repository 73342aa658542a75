"""Which part of a whole tensor a rank holds, and over which ranks the parts are spread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from operator import mul
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from fullshard import _torch
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.tensors.ragged_shard import Interval, RaggedShard


def coordinate_in(mesh: DeviceMesh) -> tuple[int, ...]:
    """Where this rank is in ``mesh``, one number for each mesh dim.

    Raises:
        ConfigError: it is not in it.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in {mesh}: let only ranks of the mesh use its tensors"
        )
    return tuple(coordinate)


def chunk_of(size: int, num_chunks: int, index: int) -> Interval:
    """Which of ``size`` rows chunk ``index`` has, as ``torch.chunk`` cuts; late ones may be empty.

    >>> [chunk_of(5, 4, index).length for index in range(4)]
    [2, 2, 1, 0]
    """
    longest = -(-size // num_chunks)
    start = min(index * longest, size)
    return Interval(start, min(longest, size - start))


def own_part(
    whole: Tensor,
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Tensor:
    """What the rank at ``coordinate`` keeps of ``whole``, as ``DTensor.full_tensor`` sees it.

    That takes ``_StridedShard`` for a cut that comes after those of later mesh dims, where its
    split factor fits, and else for one of each of so many pieces. Where sizes are uneven the two
    can differ, and what torch cuts by itself (``distribute_tensor``) is always the second.

    Args:
        whole: a tensor, or a part that mesh dims further left have left over.
        placements: ``Shard``, ``_StridedShard`` or ``Replicate`` for each mesh dim.
        mesh_shape: the size of each of these mesh dims.
        coordinate: the rank's place on each of them.

    Returns:
        A view of ``whole``, or a copy where the part has gaps; uneven and empty parts included.
    """
    order = _order_of_cuts(placements, mesh_shape)
    part = whole
    for mesh_dim in range(len(placements)) if order is None else order:
        placement, num_ranks = placements[mesh_dim], mesh_shape[mesh_dim]
        if not isinstance(placement, _CUTS):
            continue
        factor = _split_factor(placement) if order is None else 1
        pieces = (_chunk(part, placement.dim, factor, index) for index in range(factor))
        own = [_chunk(piece, placement.dim, num_ranks, coordinate[mesh_dim]) for piece in pieces]
        part = own[0] if factor == 1 else torch.cat(own, placement.dim)
    return part


_CUTS = (Shard, _torch.StridedShard)


def _split_factor(placement: Placement) -> int:
    """How many pieces there are already when this cut is made; a kind of Shard in some versions."""
    return int(placement.split_factor) if isinstance(placement, _torch.StridedShard) else 1


def _order_of_cuts(
    placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> Iterable[int] | None:
    """The mesh dims that cut, in the order in which they do; None if split factors fit none."""
    orders: dict[int, list[int]] = {}  # by tensor dim
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        if isinstance(placement, _CUTS):
            order = orders.setdefault(placement.dim, [])
            pieces = list(accumulate((mesh_shape[dim] for dim in order), mul, initial=1))
            if _split_factor(placement) not in pieces:
                return None
            order.insert(pieces.index(_split_factor(placement)), mesh_dim)
    return chain.from_iterable(orders.values())


def _chunk(tensor: Tensor, dim: int, num_chunks: int, index: int) -> Tensor:
    return tensor.narrow(dim, *chunk_of(tensor.shape[dim], num_chunks, index))


class Spread(NamedTuple):
    """Over which ranks the elements of a tensor are spread.

    Attributes:
        groups: sums over one after the other give what all elements together give, ``copies``
            times, and to the last bit the same on all their ranks.
        copies: how often they count each element.
    """

    groups: tuple[dist.ProcessGroup, ...]
    copies: int


def spread_of(mesh: DeviceMesh, placements: Sequence[Placement]) -> Spread:
    """The groups along mesh dims on which tensors placed so are cut, and on which they are copied.

    Replicas left of the first cut hold the same in the same memory, and find the same by
    themselves. Copies right of it, those of tensor parallelism, may be cut at other places, or
    lie beside other things, so that sums round otherwise: they are counted, and divided.

    Raises:
        UnsupportedError: the tensors are partial sums.
    """
    groups: list[dist.ProcessGroup] = []
    copies = 1
    for dim, placement in enumerate(placements):
        if _is_cut(placement):
            groups.append(mesh.get_group(dim))
        elif groups and mesh.size(dim) > 1:
            groups.append(mesh.get_group(dim))
            copies *= mesh.size(dim)
    return Spread(tuple(groups), copies)


def _is_cut(placement: Placement) -> bool:
    """Whether ranks hold different elements."""
    if isinstance(placement, Replicate):
        return False
    if isinstance(placement, (Shard, _torch.StridedShard, RaggedShard)):
        return True
    raise UnsupportedError(
        f"a tensor is placed as {placement}: its elements are not known before it is reduced; "
        "redistribute it first"
    )
