"""Where the elements of an optimizer's parameter lie, whatever its form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from fullshard.comm import flattened
from fullshard.errors import UnsupportedError
from fullshard.layout.region import Interval, Region
from fullshard.optim.owners import OwnedBlock, Rule, grain_of, pieces_of
from fullshard.tensors import placed_pieces_of, region_of
from fullshard.tensors.parts import coordinate_in


class SpreadParam(NamedTuple):
    """A parameter of which ranks hold parts, or copies."""

    shape: tuple[int, ...]
    placements: tuple[Placement, ...]


def spread_or_plain(param: Tensor, label: str) -> tuple[SpreadParam, DeviceMesh | None]:
    """Return where ``param`` lies; on no mesh, whole, if it is a plain tensor.

    Args and errors are those of ``spread_param_of``.
    """
    if param.layout is not torch.strided:
        raise UnsupportedError(f"{label} is {param.layout}; expected a dense tensor")
    return spread_param_of(param, label) or (SpreadParam(tuple(param.shape), ()), None)


def spread_param_of(param: Tensor, label: str) -> tuple[SpreadParam, DeviceMesh] | None:
    """Return where ``param`` lies, and on which mesh; None for a plain tensor.

    Args:
        param: a DTensor, or a plain piece of ``FullyShardedDataParallel``.
        label: a name for error messages.

    Raises:
        UnsupportedError: it is a flat parameter, a pending sum, or a sparse tensor.
    """
    if isinstance(param, DTensor):
        if any(one.is_partial() for one in param.placements):
            raise UnsupportedError(
                f"{label} is placed as {param.placements}: redistribute it first, its elements are "
                "not known before they are reduced"
            )
        return SpreadParam(tuple(param.shape), tuple(param.placements)), param.device_mesh
    pieces = placed_pieces_of(param)
    if not pieces:
        return None
    (piece, *others), whole = pieces, pieces[0].whole
    if whole is None or others:
        raise UnsupportedError(
            f"{label} is a flat parameter, one long vector of {len(pieces)} parameter(s), in which "
            "no matrix can be seen: give FullyShardedDataParallel use_orig_params=True"
        )
    return SpreadParam(tuple(whole), tuple(piece.place.placements)), piece.place.mesh


class Ranks:
    """The ranks of a mesh in ascending order, and what each holds of parameters.

    Attributes:
        numbers: the ranks, as numbers of the default process group.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        """Take the ranks of ``mesh``; None: this rank alone, whose tensors are plain."""
        self._mesh = mesh
        self._shape = () if mesh is None else tuple(mesh.shape)
        order = [0] if mesh is None else mesh.mesh.flatten().tolist()
        self.numbers: list[int] = sorted(order)
        at = {rank: index for index, rank in enumerate(order)}
        self._coordinates = [self._coordinate(at[rank]) for rank in self.numbers]
        self._regions: dict[tuple[SpreadParam, tuple[int, ...]], Region] = {}
        self._holdings: dict[SpreadParam, list[list[tuple[int, Interval]]]] = {}
        self._homes: dict[tuple[object, ...], tuple[int, ...]] = {}  # layers are alike

    @property
    def is_alone(self) -> bool:
        """Return whether there is no mesh, so that tensors are plain."""
        return self._mesh is None

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks as a 1-D mesh; the first access may be a collective, see ``flattened``."""
        assert self._mesh is not None, "plain tensors have no mesh"
        # A mesh of one dim is itself, by whose name it is known as a part of the model's mesh.
        return self._mesh if self._mesh.ndim == 1 else flattened(self._mesh)

    @cached_property
    def own(self) -> int:
        """Index of this rank."""
        return self._coordinates.index(() if self._mesh is None else coordinate_in(self._mesh))

    def region(self, param: SpreadParam, index: int) -> Region:
        """Return what the rank with this index holds of a parameter."""
        at = self._coordinates[index]
        cuts = [not isinstance(one, Replicate) for one in param.placements]
        key = (param, tuple(own if cut else 0 for own, cut in zip(at, cuts, strict=True)))
        if key not in self._regions:
            self._regions[key] = region_of(param.shape, param.placements, self._shape, at)
        return self._regions[key]

    def shares_copy(self, param: SpreadParam, one: int, other: int) -> bool:
        """Return whether two ranks, by index, hold parts of the same copy of a parameter."""
        a, b = self._coordinates[one], self._coordinates[other]
        pairs = zip(param.placements, a, b, strict=True)
        return all(mine == its for kind, mine, its in pairs if isinstance(kind, Replicate))

    def num_copies(self, param: SpreadParam) -> int:
        """Return how many ranks hold the same elements."""
        pairs = zip(param.placements, self._shape, strict=True)
        return math.prod(size for kind, size in pairs if isinstance(kind, Replicate))

    def homes(self, param: SpreadParam, block: OwnedBlock) -> tuple[int, ...]:
        """Return the indices of the ranks that hold all of a block."""
        key = (param, block.start, block.numel)
        if key not in self._homes:
            self._homes[key] = tuple(
                index
                for index in range(len(self.numbers))
                if _is_all(self.region(param, index), block, param.shape)
            )
        return self._homes[key]

    def holdings(self, param: SpreadParam) -> list[list[tuple[int, Interval]]]:
        """Return for each copy of a parameter which rank, by index, holds which elements.

        None of them if what a rank holds has gaps.
        """
        if param in self._holdings:
            return self._holdings[param]
        copies: list[list[tuple[int, Interval]]] = []
        self._holdings[param] = copies
        for index in range(len(self.numbers)):
            interval = self.region(param, index).interval_in(param.shape)
            if interval is None:
                copies.clear()
                break
            own = (one for one in copies if self.shares_copy(param, one[0][0], index))
            found = next(own, None)
            if found is None:
                copies.append(found := [])
            found.append((index, interval))
        return copies

    def _coordinate(self, index: int) -> tuple[int, ...]:
        found: list[int] = []
        for size in reversed(self._shape):
            index, own = divmod(index, size)
            found.append(own)
        return tuple(reversed(found))


class Pieces(NamedTuple):
    """A parameter in pieces, see ``pieces_of``; ``owners`` are indices of ranks."""

    blocks: list[OwnedBlock]
    owners: list[int]


def pieces_on(
    ranks: Ranks, params: Iterable[tuple[str, SpreadParam]], rule: Rule | None
) -> dict[int, Pieces]:
    """Return, by number, the parameters of which ranks step the pieces that they hold.

    Where there are several copies, each steps some of the parameters.

    Args:
        ranks: the ranks of the parameters' mesh.
        params: name and place of each.
        rule: see ``Rule``.
    """
    found: dict[int, Pieces] = {}
    load = [0] * len(ranks.numbers)
    for number, (name, spread) in enumerate(params):
        grain = grain_of(name, spread.shape, rule)
        copies = ranks.holdings(spread) if grain and not ranks.is_alone else []
        cut = (pieces_of(number, spread.shape, copy, grain) for copy in copies)
        choices = [Pieces(*one) for one in cut if one is not None]
        if choices:
            own = min(choices, key=lambda one: sum(map(load.__getitem__, one.owners)))
            found[number] = own
            for block, owner in zip(own.blocks, own.owners, strict=True):
                load[owner] += block.numel
    return found


def _is_all(region: Region, block: OwnedBlock, whole: Sequence[int]) -> bool:
    if region.numel < block.numel:
        return False
    overlaps = region.stretches(block.region(tuple(whole)))
    return sum(one.numel for one in overlaps) == block.numel
