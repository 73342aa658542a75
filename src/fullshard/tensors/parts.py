"""Compute the part of a full tensor that a rank holds, and the ranks that share the tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, chain
from operator import mul
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard._torch import dtensor as _dtensor
from fullshard.comm import all_reduce
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.layout.region import Interval, Intervals, Region, cut, full_region
from fullshard.tensors.ragged_shard import RaggedShard


def aten_ops(names: str) -> list[Any]:
    """Return the operations with these names, such as "mul.Tensor", that this PyTorch has."""
    pairs = [name.partition(".")[::2] for name in names.split()]
    found = [getattr(getattr(torch.ops.aten, op, None), overload, None) for op, overload in pairs]
    return [op for op in found if op is not None]


def coordinate_in(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the coordinate of this rank in ``mesh``, one index for each mesh dim.

    Raises:
        ConfigError: if this rank is not in ``mesh``.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in {mesh}: let only ranks of the mesh use its tensors"
        )
    return tuple(coordinate)


def chunk_of(size: int, num_chunks: int, index: int) -> Interval:
    """Return the rows, perhaps none, of chunk ``index`` if ``torch.chunk`` cuts ``size`` rows.

    >>> [chunk_of(5, 4, index).length for index in range(4)]
    [2, 2, 1, 0]
    """
    longest = -(-size // num_chunks)
    start = min(index * longest, size)
    return Interval(start, min(longest, size - start))


def own_part(
    full: Tensor,
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Tensor:
    """Return the part of ``full`` at ``coordinate``, see ``region_of``.

    Returns:
        A view of ``full``, or a copy if the part has gaps; parts may be uneven or empty. An
        interval, of ``RaggedShard``, is 1-D.
    """
    region = region_of(full.shape, placements, mesh_shape, coordinate)
    part = full
    for dim, intervals in enumerate(region.dims):
        pieces = [part.narrow(dim, *one) for one in intervals]
        part = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    if any(isinstance(placement, RaggedShard) for placement in placements):
        return part.reshape(-1)[region.start : region.stop]
    return part


def region_of(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Region:
    """Return the region at ``coordinate`` of a tensor, as ``DTensor.full_tensor`` understands it.

    ``full_tensor`` treats ``_StridedShard`` as a cut after the cuts of later mesh dims if the split
    factor fits, else as a cut of each of that many pieces. For uneven sizes the two can differ; the
    cuts that torch itself makes (``distribute_tensor``) always have the second meaning.
    ``RaggedShard`` cuts the elements that all other cuts have left.

    Args:
        shape: of a tensor, or of the part of a tensor that mesh dims further left have produced.
        placements: shards of any kind, or ``Replicate``, one for each mesh dim.
        mesh_shape: the size of each of these mesh dims.
        coordinate: the rank's coordinate on each of these mesh dims.
    """
    is_known = all(type(size) is int for size in shape)  # else symbolic, which has no hash
    find = _region_of if is_known else _region_of.__wrapped__
    return find(tuple(shape), tuple(placements), tuple(mesh_shape), tuple(coordinate))


@cache  # layers are alike
def _region_of(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> Region:
    order = _order_of_cuts(placements, mesh_shape)
    dims = list(full_region(shape).dims)
    for mesh_dim in range(len(placements)) if order is None else order:
        placement = placements[mesh_dim]
        if isinstance(placement, _CUTS):
            factor = _split_factor(placement) if order is None else 1
            at = (factor, mesh_shape[mesh_dim], coordinate[mesh_dim])
            dims[placement.dim] = _chunks(dims[placement.dim], *at)
    numel = math.prod(sum(one.length for one in intervals) for intervals in dims)
    own = Interval(0, numel)
    for placement, index in zip(placements, coordinate, strict=True):
        if isinstance(placement, RaggedShard):
            own = placement.interval(index)
    return Region(tuple(dims), own.start, own.stop)


def coordinates_near(
    box: Sequence[Interval],
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    fixed: Sequence[int],
) -> Iterator[tuple[int, ...]]:
    """Yield the coordinates whose regions have something in a ``box`` that is not empty.

    If a split factor fits no order of cuts, there may be further coordinates. ``fixed`` is the
    coordinate to take on mesh dims that do not cut. See ``region_of`` for the other arguments.
    """
    order = _order_of_cuts(placements, mesh_shape)
    if order is None:
        sizes = zip(placements, mesh_shape, fixed, strict=True)
        yield from itertools.product(
            *(range(size) if _is_cut(one) else (own,) for one, size, own in sizes)
        )
        return
    yield from _walk(list(order), list(full_region(shape).dims), box, placements, mesh_shape, fixed)


def _walk(
    order: Sequence[int],
    dims: list[Intervals],
    box: Sequence[Interval],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Iterator[tuple[int, ...]]:
    """Yield the coordinates below a part that mesh dims before those in ``order`` have cut."""
    if not order:
        yield from _of_intervals([one for (one,) in dims], box, placements, coordinate)
        return
    mesh_dim, *rest = order
    dim = placements[mesh_dim].dim  # type: ignore[attr-defined]
    ((start, size),) = dims[dim]
    longest = -(-size // mesh_shape[mesh_dim])
    first, stop = max(box[dim].start - start, 0), min(box[dim].stop - start, size)
    for index in range(first // longest, -(-stop // longest)) if first < stop else ():
        own = chunk_of(size, mesh_shape[mesh_dim], index)
        inner = [*dims[:dim], (Interval(start + own.start, own.length),), *dims[dim + 1 :]]
        at = [*coordinate[:mesh_dim], index, *coordinate[mesh_dim + 1 :]]
        yield from _walk(rest, inner, box, placements, mesh_shape, at)


def _of_intervals(
    dims: Sequence[Interval],
    box: Sequence[Interval],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> Iterator[tuple[int, ...]]:
    """Yield ``coordinate``, or of a ragged mesh dim all whose intervals meet ``box``."""
    ragged = [at for at, one in enumerate(placements) if isinstance(one, RaggedShard)]
    if not ragged:
        yield tuple(coordinate)
        return
    first = last = 0
    for own, one in zip(dims, box, strict=True):
        begin, end = max(own.start, one.start), min(own.stop, one.stop)
        if begin >= end:
            return
        first = first * own.length + begin - own.start
        last = last * own.length + end - 1 - own.start
    for index in placements[ragged[0]].ranks_in(first, last + 1):  # type: ignore[attr-defined]
        yield (*coordinate[: ragged[0]], index, *coordinate[ragged[0] + 1 :])


def _chunks(intervals: Intervals, num_pieces: int, num_chunks: int, index: int) -> Intervals:
    """Return the indices in chunk ``index`` of each of ``num_pieces`` pieces of ``intervals``."""
    size = sum(one.length for one in intervals)
    pieces = (cut(intervals, *chunk_of(size, num_pieces, piece)) for piece in range(num_pieces))
    chunks = [
        cut(piece, *chunk_of(sum(one.length for one in piece), num_chunks, index))
        for piece in pieces
    ]
    filled = [one for chunk in chunks for one in chunk if one.length]
    return tuple(filled) or chunks[0][:1]


_CUTS = (Shard, _dtensor.StridedShard)


def _split_factor(placement: Placement) -> int:
    """Return how many pieces exist before this cut; StridedShard is a Shard in some versions."""
    return int(placement.split_factor) if isinstance(placement, _dtensor.StridedShard) else 1


def _order_of_cuts(
    placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> Iterable[int] | None:
    """Return the mesh dims that cut, in the order of cuts; None if split factors fit no order."""
    orders: dict[int, list[int]] = {}  # keyed by tensor dim
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        if isinstance(placement, _CUTS):
            order = orders.setdefault(placement.dim, [])
            pieces = list(accumulate((mesh_shape[dim] for dim in order), mul, initial=1))
            if _split_factor(placement) not in pieces:
                return None
            order.insert(pieces.index(_split_factor(placement)), mesh_dim)
    return chain.from_iterable(orders.values())


class Sharding(NamedTuple):
    """The ranks over which the elements of a tensor are spread.

    Attributes:
        groups: process groups; sums over one after the other give ``copies`` times the sum of all
            elements, bitwise equal on all ranks of the groups.
        copies: how many times these sums count each element.
    """

    groups: tuple[dist.ProcessGroup, ...]
    copies: int

    def total(self, values: Tensor) -> Tensor:
        """Sum ``values`` over all ranks, in place, so that each element counts once."""
        for group in self.groups:
            all_reduce(values, group, is_max=False)
        if self.copies > 1:
            is_exact = not (values.is_floating_point() or values.is_complex())
            values.div_(self.copies, rounding_mode="floor" if is_exact else None)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of all ranks' ``values``, one by one; NaN where a rank has NaN."""
        if not self.groups:
            return values
        # A max all-reduce may lose a NaN, so a NaN flag is sent beside each value.
        is_nan = values.isnan().to(values.dtype)
        sent = torch.stack([torch.where(values.isnan(), 0, values), is_nan])
        for group in self.groups:
            all_reduce(sent, group, is_max=True)
        found = sent[0]
        return found.masked_fill(sent[1] > 0, math.nan) if found.is_floating_point() else found


def sharding_of(mesh: DeviceMesh, placements: Sequence[Placement]) -> Sharding:
    """Return the spread over ``mesh`` of tensors with ``placements``.

    Replicas left of the first cut have equal local tensors, which give equal sums without
    communication. Copies right of the first cut, from tensor parallelism, may be cut differently or
    be next to other elements, so their sums round differently: sum over them, divide by ``copies``.

    Raises:
        UnsupportedError: if the tensors are partial sums.
    """
    groups: list[dist.ProcessGroup] = []
    copies = 1
    for dim, placement in enumerate(placements):
        if _is_cut(placement):
            groups.append(mesh.get_group(dim))
        elif groups and mesh.size(dim) > 1:
            groups.append(mesh.get_group(dim))
            copies *= mesh.size(dim)
    return Sharding(tuple(groups), copies)


def _is_cut(placement: Placement) -> bool:
    """Return whether ranks hold different elements along a mesh dim with ``placement``."""
    if isinstance(placement, Replicate):
        return False
    if isinstance(placement, (Shard, _dtensor.StridedShard, RaggedShard)):
        return True
    raise UnsupportedError(
        f"a tensor is placed as {placement}: its elements are not known before it is reduced; "
        "redistribute it first"
    )


def is_partial(tensor: DTensor) -> bool:
    """Return whether ``tensor`` has a Partial placement, a reduction that is still pending."""
    return any(placement.is_partial() for placement in tensor.placements)


def gathered(value: Any) -> Any:
    """Return the full tensor of a DTensor (a collective unless replicated), else ``value``."""
    if not isinstance(value, DTensor):
        return value
    # Inside an operation autograd is off, but ``requires_grad`` stays set. Before 2.12 this makes
    # PyTorch detach the gathered tensor in place, which DTensors of that version cannot do.
    with torch.no_grad():
        return cast("DTensor", value.detach()).full_tensor()


class _OtherCut(UnsupportedError, ConfigError):
    """The error for a local tensor that is cut in another way than its placements say."""


def part_like(full: Tensor, like: DTensor, op: object = "load") -> Tensor:
    """Return this rank's part of ``full``, cut by the placements of ``like``; no communication.

    Args:
        full: a plain tensor of the global shape of ``like``.
        like: a DTensor without Partial placements, ragged or not.
        op: the operation, for the error message.

    Raises:
        UnsupportedError, ConfigError: the local tensor of ``like`` has another shape than this
            part (both).
    """
    mesh, placements = like.device_mesh, like.placements
    part = own_part(full, placements, mesh.shape, coordinate_in(mesh))
    held = _dtensor.local_of(like).shape
    if part.shape != held:
        raise _OtherCut(
            f"{op}: this rank holds {tuple(held)} of a DTensor of shape {tuple(like.shape)}, "
            f"where {placements} on a mesh of shape {tuple(mesh.shape)} say {tuple(part.shape)}; "
            "fill the local tensor itself, save and load it sharded, or shard evenly"
        )
    return part


def keep_own_part(op: Any, full: Tensor, target: DTensor) -> DTensor:
    """Write this rank's part of ``full`` into ``target``, and return ``target``."""
    _dtensor.local_of(target).copy_(part_like(full, target, op))
    return target


def replicated(full: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a replicated DTensor around ``full``, which is the same on all ranks."""
    placements, stride = (Replicate(),) * mesh.ndim, full.stride()
    spec = _dtensor.dtensor_spec(
        mesh, placements, shape=full.shape, dtype=full.dtype, stride=stride
    )
    return _dtensor.dtensor_from_spec(full, spec, requires_grad=False, cls=DTensor)
