"""A tensor of a checkpoint, as the ranks of one mesh hold it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from fullshard._torch import dtensor as _dtensor
from fullshard.errors import CheckpointError
from fullshard.layout.region import Region, full_region
from fullshard.tensors import RaggedShard, coordinates_near, region_of


class Grid(NamedTuple):
    """A mesh without its process groups: its shape, and its ranks in row-major order."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the mesh in JSON's types."""
        first, count = self.ranks[0], len(self.ranks)
        in_order = self.ranks == tuple(range(first, first + count))
        ranks = {"first": first, "count": count} if in_order else self.ranks
        return {"shape": self.shape, "ranks": ranks}

    @classmethod
    def from_json(cls, stored: Any, world: int) -> Grid:
        """Return a mesh of ``world`` ranks at most; equal ones are the same object."""
        ranks = stored["ranks"]
        if isinstance(ranks, dict):
            if not 0 <= ranks["count"] <= world:
                raise CheckpointError(f"a mesh of {ranks['count']} ranks, of {world}")
            ranks = range(ranks["first"], ranks["first"] + ranks["count"])
        return _only_one(cls(tuple(stored["shape"]), tuple(ranks)))


@cache
def _coordinates(grid: Grid) -> dict[int, tuple[int, ...]]:
    return dict(zip(grid.ranks, itertools.product(*map(range, grid.shape)), strict=True))


@cache
def _has_all_ranks(grid: Grid) -> bool:
    """Return whether there is a rank, and another, at each coordinate."""
    sizes, ranks = grid
    is_positive = all(size >= 1 for size in sizes) and all(rank >= 0 for rank in ranks)
    return is_positive and math.prod(sizes) == len(set(ranks)) == len(ranks)


@cache
def _has_lengths(placement: RaggedShard) -> bool:
    return all(count > 0 <= length for count, length in placement.lengths)


@cache
def _groups(grid: Grid, varies: tuple[bool, ...]) -> list[tuple[int, ...]]:
    """Return groups of ranks whose coordinates differ only in the dims of which ``varies`` is true.

    Groups, and the ranks in each, are in the order of the coordinates.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, at in _coordinates(grid).items():
        key = tuple(0 if same else own for same, own in zip(varies, at, strict=True))
        groups.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


class TensorEntry(NamedTuple):
    """A tensor of a checkpoint, as the ranks of one mesh hold it.

    Attributes:
        dtype: such as "float32".
        shape: of the full tensor.
        grid: the ranks that hold it.
        placements: one for each dim of the grid; None: a plain tensor, whole on every rank.
        writer: which of the ranks that hold the same elements writes them.
    """

    dtype: str
    shape: tuple[int, ...]
    grid: Grid
    placements: tuple[Placement, ...] | None
    writer: int

    def region(self, rank: int) -> Region:
        """Return the elements that ``rank`` holds."""
        coordinate = _coordinates(self.grid)[rank]
        region = region_of(self.shape, self._placements(), self.grid.shape, coordinate)
        if region.stop > math.prod(region.grid):
            raise CheckpointError(f"rank {rank} cannot hold what its intervals say")
        return region

    @property
    def num_copies(self) -> int:
        """Number of ranks that hold the same elements."""
        pairs = zip(self._placements(), self.grid.shape, strict=True)
        return math.prod(size for placement, size in pairs if isinstance(placement, Replicate))

    @property
    def is_ragged(self) -> bool:
        """Return whether ranks hold intervals, as 1-D tensors."""
        return any(isinstance(one, RaggedShard) for one in self._placements())

    def makes_sense(self) -> bool:
        """Return whether dtype, mesh, placements and writer can be those of a tensor."""
        placements, ndim = self._placements(), len(self.shape)
        cuts = [one for one in placements if not isinstance(one, (Replicate, RaggedShard))]
        sizes = self.grid.shape
        num_ranks = math.prod(sizes)
        factors = [getattr(one, "split_factor", 1) for one in cuts]
        ragged = [one for one in placements if isinstance(one, RaggedShard)]
        return (
            isinstance(getattr(torch, self.dtype, None), torch.dtype)
            and all(size >= 0 for size in self.shape)
            and _has_all_ranks(self.grid)
            and len(placements) == len(sizes)
            and all(0 <= one.dim < ndim for one in cuts)  # type: ignore[attr-defined]
            and all(1 <= factor <= num_ranks for factor in factors)
            and len(ragged) <= 1
            and all(map(_has_lengths, ragged))
            and 0 <= self.writer < self.num_copies
        )

    def rank_groups(self) -> list[tuple[int, ...]]:
        """Return the ranks of the grid in groups that need to have equal entries."""
        is_ragged = self.is_ragged
        placements = self._placements()
        kinds = tuple(isinstance(one, RaggedShard) or not is_ragged for one in placements)
        return _groups(self.grid, kinds)

    def regular(self) -> tuple[Any, ...]:
        """Return the fields that must be equal on all ranks with parts of the tensor.

        Ragged intervals are left out: ranks with different rows or columns may have different ones.
        """
        kinds = (None if isinstance(one, RaggedShard) else one for one in self._placements())
        return (self.dtype, self.shape, self.grid, self.writer, self.placements is None, *kinds)

    def writers(self, near: Region | None) -> Iterator[int]:
        """Yield the ranks that write their part, if ``near`` is given those that have some of it.

        There may be others among them.
        """
        shape, sizes, copy = self.grid.shape, [], self.writer
        for one, size in zip(self._placements()[::-1], shape[::-1], strict=True):
            own = 0
            if isinstance(one, Replicate):
                copy, own = divmod(copy, size)
            sizes.append(own)
        fixed = sizes[::-1]
        boxes = full_region(self.shape).boxes() if near is None else near.boxes()
        found = {
            coordinate: None
            for box in boxes
            for coordinate in coordinates_near(box, self.shape, self._placements(), shape, fixed)
        }
        for coordinate in found:
            index = 0
            for own, size in zip(coordinate, shape, strict=True):
                index = index * size + own
            yield self.grid.ranks[index]

    def is_written_by(self, rank: int) -> bool:
        """Return whether ``rank`` writes its part, rather than a rank with the same elements."""
        coordinate, index = _coordinates(self.grid).get(rank), 0
        if coordinate is None:
            return False
        for one, own, size in zip(self._placements(), coordinate, self.grid.shape, strict=True):
            index = index * size + own if isinstance(one, Replicate) else index
        return index == self.writer

    def left_to(self, numbers: Mapping[int, int]) -> TensorEntry | None:
        """Return the tensor as some ranks hold it, each part on one; None if they lack a part.

        Args:
            numbers: for each of these ranks its new number.
        """
        if self.placements is None:  # all keep it, so that they can be compared
            all_left = [numbers[rank] for rank in self.grid.ranks if rank in numbers]
            if not all_left:
                return None
            grid = Grid((len(all_left),), tuple(all_left))
            return self._replace(grid=grid, writer=self.writer % len(all_left))
        is_copied = tuple(isinstance(one, Replicate) for one in self._placements())
        ranks = []
        for copies in _groups(self.grid, is_copied):
            left = [numbers[rank] for rank in copies if rank in numbers]
            if not left:
                return None
            ranks.append(left[self.writer % len(left)])
        sizes = zip(self.grid.shape, is_copied, strict=True)
        shape = tuple(1 if same else size for size, same in sizes)
        return self._replace(grid=Grid(shape, tuple(ranks)), writer=0)

    def _placements(self) -> tuple[Placement, ...]:
        return self.placements or (Replicate(),) * len(self.grid.shape)


def problem_of(held: Sequence[tuple[TensorEntry, set[int]]]) -> str:
    """Return why entries, with the ranks that have them, do not make up one tensor; or nothing."""
    entry = held[0][0]
    grids = list(dict.fromkeys(one.grid for one, _ in held))
    if len(grids) > 1:
        meshes = " and ".join(str([*grid.ranks[:4]]) for grid in grids[:2])
        return (
            f"ranks on different meshes, {meshes}, have it under one name; give them other names "
            "if they differ, or one mesh that has both"
        )
    if any(one.regular() != entry.regular() for one, _ in held):
        return "ranks have it in different shapes or dtypes, or placed differently"
    lost = set(entry.grid.ranks).difference(*(ranks for _, ranks in held))
    if lost:
        return f"ranks {sorted(lost)[:8]} of its mesh do not hold it"
    for group in entry.rank_groups() if len(held) > 1 or entry.is_ragged else ():
        own = [one for one, ranks in held if not ranks.isdisjoint(group)]
        region = own[0].region(group[0])
        intervals = [p.numel for p in own[0].placements or () if isinstance(p, RaggedShard)]
        if len(own) > 1 or intervals not in ([], [math.prod(region.grid)]):
            return f"ranks {[*group[:8]]} do not hold {math.prod(region.grid)} elements together"
    return ""


@cache
def _only_one(grid: Grid) -> Grid:
    return grid


def placement_to_json(placement: Placement) -> list[Any]:
    """Return a placement in JSON's types."""
    if isinstance(placement, RaggedShard):
        return ["ragged", placement.lengths]
    if isinstance(placement, _dtensor.StridedShard):
        return ["strided", placement.dim, placement.split_factor]
    if isinstance(placement, Shard):
        return ["shard", placement.dim]
    assert isinstance(placement, Replicate)
    return ["replicate"]


def placement_from_json(stored: Any) -> Placement:
    """Return the placement that ``placement_to_json`` was given."""
    kind, *rest = stored
    if kind == "ragged":
        return RaggedShard([(num_ranks, length) for num_ranks, length in rest[0]])
    if kind == "strided":
        strided: Placement = _dtensor.StridedShard(rest[0], split_factor=rest[1])
        return strided
    return Shard(rest[0]) if kind == "shard" else Replicate()
