"""Assign matrices to owners: where each parameter lies, and which rank steps it."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from fullshard.comm import flattened
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.layout.region import Interval, Region, full_region
from fullshard.tensors import placed_pieces_of, region_of
from fullshard.tensors.parts import coordinate_in

Shape = tuple[int, ...]
Cost = Callable[[Shape], float]
Rule = int | Callable[[str, Shape], "str | int | Sequence[int] | None"]
"""A function from a parameter's name and shape to its blocks, see ``blocks_of``; or a number of
elements for all parameters."""

SLACK = 1.05
"""The largest load, as a multiple of the least possible one, at which a matrix may stay."""

_NS_STEPS = 5


class OwnedBlock(NamedTuple):
    """A tensor that one rank steps: all, some rows, or a piece of a parameter.

    Attributes:
        shape: shape of the tensor.
        start: the parameter's elements before it, in row-major order.
        block_size: of a piece, the elements of a multiple of which it begins; else 0.
    """

    shape: Shape
    start: int = 0
    block_size: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def region(self, full: Shape) -> Region:
        """Return its elements in a parameter of shape ``full``."""
        return full_region(full).part(self.start, self.start + self.numel)


def newton_schulz_flops(shape: Shape) -> float:
    """Return the operations of five Newton-Schulz steps, plus ten per element.

    A matrix of three or more dims counts as its first dim times all others; with fewer than two
    dims there is nothing to orthogonalise.
    """
    numel = math.prod(shape)
    if len(shape) < 2 or not numel:
        return 10.0 * numel
    short, long = sorted((shape[0], numel // shape[0]))
    return 10.0 * numel + _NS_STEPS * (4.0 * short * short * long + 2.0 * short**3)


def blocks_of(name: str, shape: Shape, rule: Rule | None) -> list[OwnedBlock]:
    """Return the blocks of a parameter, in the order of its elements.

    If the rule returns None, the parameter is one matrix. With "each", each index of the first dim
    is a matrix with one dim less, as in a stack of experts. Numbers of rows give matrices of so
    many rows, as in queries, keys and values that are one parameter.

    Raises:
        ConfigError: the rule returns anything else, or rows that do not add up.
    """
    wanted = _wanted(name, shape, rule)
    if wanted is None or _is_count(wanted):
        return [OwnedBlock(shape)]
    if shape and (wanted == "each" or _are_rows(wanted, shape[0])):
        each = wanted == "each"
        counts = [1] * shape[0] if each else [*map(int, wanted)]  # type: ignore[arg-type]
        inner, found, row = shape[1:], [], 0
        for count in counts:
            own = inner if each else (count, *inner)
            found.append(OwnedBlock(own, row * math.prod(inner)))
            row += count
        return found
    raise ConfigError(
        f"blocks: the rule returned {wanted!r} for {name or 'a parameter'} of shape {shape}; "
        'expected None, "each", numbers of rows above 0 that add up to its first dim, or a number '
        "of elements"
    )


def block_size_of(name: str, shape: Shape, rule: Rule | None) -> int:
    """Return the number of elements that the rule returns, 0 if it says something else."""
    wanted = _wanted(name, shape, rule)
    return wanted if _is_count(wanted) else 0


def _wanted(name: str, shape: Shape, rule: Rule | None) -> str | int | Sequence[int] | None:
    return rule if rule is None or isinstance(rule, int) else rule(name, shape)


def _is_count(wanted: object) -> TypeGuard[int]:
    return isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0


class Pieces(NamedTuple):
    """The pieces of a parameter, and their owners, indices of ranks."""

    blocks: list[OwnedBlock]
    owners: list[int]


def pieces_of(
    shape: Shape, holdings: Sequence[tuple[int, Interval]], block_size: int
) -> Pieces | None:
    """Return the pieces of a parameter; owners are the ranks that hold (most of) them.

    Each cut is moved to the nearest multiple of ``block_size`` elements. A parameter left with no
    cut is a full matrix, stepped by the rank that holds (most of) it.

    Args:
        shape: shape of the parameter.
        holdings: ranks that together hold one copy of it, each with the elements that it holds.
        block_size: a number of elements.

    Returns:
        The pieces. None if the parameter is empty, or if ranks hold its parts in another order.
    """
    numel = math.prod(shape)
    held = sorted((one for one in holdings if one[1].length), key=lambda one: one[1].start)
    ranks = [rank for rank, _ in held]
    if not held or ranks != sorted(ranks) or sum(one.length for _, one in held) != numel:
        return None
    cuts = [(one.start + block_size // 2) // block_size * block_size for _, one in held] + [numel]
    lengths = [min(stop, numel) - start for start, stop in itertools.pairwise(cuts)]
    found = [one for one in zip(cuts, lengths, ranks, strict=False) if one[1] > 0]
    if len(found) == 1:
        return Pieces([OwnedBlock(shape)], [found[0][2]])
    blocks = [OwnedBlock((length,), start, block_size) for start, length, _ in found]
    return Pieces(blocks, [rank for _, _, rank in found])


def _are_rows(wanted: object, size: int) -> bool:
    if isinstance(wanted, str) or not isinstance(wanted, Sequence):
        return False
    return all(isinstance(one, int) and one > 0 for one in wanted) and sum(wanted) == size


class Matrix(NamedTuple):
    """Facts about a matrix that decide its owner.

    Attributes:
        param: number of the parameter of which it is a block.
        cost: of one step, in any unit.
        holders: ranks that hold all of it, one in each copy of the parameter.
    """

    param: int
    cost: float
    holders: tuple[int, ...] = ()


def owners_of(
    matrices: Sequence[Matrix], num_ranks: int, loads: Mapping[int, float] | None = None
) -> list[int]:
    """Return the rank that owns each matrix; a function of its arguments, equal on all ranks.

    Costly matrices first, each goes to the rank with the least to do. A matrix that a rank holds
    in full stays there, so that nothing travels, unless that rank had more than ``SLACK`` times the
    least largest load that any choice could reach. Blocks of one parameter are given to its owners
    in the order of ranks, so that each rank owns an interval of the parameter.

    Args:
        matrices: blocks of a parameter follow each other.
        num_ranks: number of ranks.
        loads: costs that ranks have already.
    """
    load = [(loads or {}).get(rank, 0.0) for rank in range(num_ranks)]
    order = sorted(range(len(matrices)), key=lambda at: (-matrices[at].cost, at))
    total, largest = math.fsum(one.cost for one in matrices), max(load, default=0.0)
    if matrices:
        largest = max(largest, matrices[order[0]].cost)
    limit = SLACK * max((total + math.fsum(load)) / num_ranks, largest)
    owners = [-1] * len(matrices)
    idlest = [(own, rank) for rank, own in enumerate(load)]
    heapq.heapify(idlest)
    for at in order:
        cost, holders = matrices[at].cost, matrices[at].holders
        rank = min(holders, key=lambda holder: (load[holder], holder), default=-1)
        if rank < 0 or load[rank] + cost > limit:
            while idlest[0][0] < load[idlest[0][1]]:  # has got a matrix since
                heapq.heapreplace(idlest, (load[idlest[0][1]], idlest[0][1]))
            rank = idlest[0][1]
        owners[at] = rank
        load[rank] += cost
    of_param: dict[int, list[int]] = {}
    for matrix, owner in zip(matrices, owners, strict=True):
        of_param.setdefault(matrix.param, []).append(owner)
    return [owner for those in of_param.values() for owner in sorted(those)]


def rounds_of(
    matrices: Sequence[tuple[int, int]], num_ranks: int, budget_nbytes: int
) -> list[list[int]]:
    """Return rounds of matrices: in each, every owner gets at most so many bytes, or one matrix.

    Args:
        matrices: owner and bytes of each, in the order in which owners take them.
        num_ranks: number of ranks.
        budget_nbytes: bytes that an owner gets in one round.
    """
    number, filled = [0] * num_ranks, [0] * num_ranks
    rounds: list[list[int]] = []
    for at, (owner, nbytes) in enumerate(matrices):
        if filled[owner] and filled[owner] + nbytes > budget_nbytes:
            number[owner] += 1
            filled[owner] = 0
        filled[owner] += nbytes
        while len(rounds) <= number[owner]:
            rounds.append([])
        rounds[number[owner]].append(at)
    return rounds


class ParamPlacement(NamedTuple):
    """A parameter of which ranks hold parts, or copies."""

    shape: tuple[int, ...]
    placements: tuple[Placement, ...]


def placement_or_plain(param: Tensor, label: str) -> tuple[ParamPlacement, DeviceMesh | None]:
    """Return the placement and the mesh of ``param``; for a plain tensor the mesh is None.

    Args and errors are those of ``placement_of``.
    """
    if param.layout is not torch.strided:
        raise UnsupportedError(f"{label} is {param.layout}; expected a dense tensor")
    return placement_of(param, label) or (ParamPlacement(tuple(param.shape), ()), None)


def placement_of(param: Tensor, label: str) -> tuple[ParamPlacement, DeviceMesh] | None:
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
        return ParamPlacement(tuple(param.shape), tuple(param.placements)), param.device_mesh
    pieces = placed_pieces_of(param)
    if not pieces:
        return None
    (piece, *others), full = pieces, pieces[0].full_shape
    if full is None or others:
        raise UnsupportedError(
            f"{label} is a flat parameter, one long vector of {len(pieces)} parameter(s), in which "
            "no matrix can be seen: give FullyShardedDataParallel use_orig_params=True"
        )
    return ParamPlacement(tuple(full), tuple(piece.place.placements)), piece.place.mesh


class Ranks:
    """The ranks of a mesh in ascending order, and the parts of parameters that each holds.

    Attributes:
        numbers: the ranks, as numbers of the default process group.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        """Take the ranks of ``mesh``; None: this rank alone, whose tensors are plain."""
        self._mesh = mesh
        self._shape = () if mesh is None else tuple(mesh.shape)
        order = [0] if mesh is None else mesh.mesh.flatten().tolist()
        coordinates = itertools.product(*map(range, self._shape))
        pairs = sorted(zip(order, coordinates, strict=True))
        self.numbers: list[int] = [rank for rank, _ in pairs]
        self._coordinates = [at for _, at in pairs]
        self._holdings: dict[ParamPlacement, list[list[tuple[int, Interval]]]] = {}
        self._holders: dict[tuple[object, ...], tuple[int, ...]] = {}  # layers are alike

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

    def region(self, param: ParamPlacement, index: int) -> Region:
        """Return what the rank with this index holds of a parameter."""
        pairs = zip(param.placements, self._coordinates[index], strict=True)
        at = tuple(0 if isinstance(kind, Replicate) else own for kind, own in pairs)
        return region_of(param.shape, param.placements, self._shape, at)

    def shares_copy(self, param: ParamPlacement, one: int, other: int) -> bool:
        """Return whether two ranks, by index, hold parts of the same copy of a parameter."""
        return self._copy_of(param, one) == self._copy_of(param, other)

    def _copy_of(self, param: ParamPlacement, index: int) -> tuple[int, ...]:
        pairs = zip(param.placements, self._coordinates[index], strict=True)
        return tuple(own for kind, own in pairs if isinstance(kind, Replicate))

    def num_copies(self, param: ParamPlacement) -> int:
        """Return how many ranks hold the same elements."""
        pairs = zip(param.placements, self._shape, strict=True)
        return math.prod(size for kind, size in pairs if isinstance(kind, Replicate))

    def holders(self, param: ParamPlacement, block: OwnedBlock) -> tuple[int, ...]:
        """Return the indices of the ranks that hold all of a block."""
        key = (param, block.start, block.numel)
        if key not in self._holders:
            self._holders[key] = tuple(
                index
                for index in range(len(self.numbers))
                if _is_all(self.region(param, index), block, param.shape)
            )
        return self._holders[key]

    def holdings(self, param: ParamPlacement) -> list[list[tuple[int, Interval]]]:
        """Return for each copy of a parameter which rank, by index, holds which elements.

        None of them if what a rank holds has gaps.
        """
        if param not in self._holdings:
            copies: dict[tuple[int, ...], list[tuple[int, Interval]]] = {}
            for index in range(len(self.numbers)):
                interval = self.region(param, index).interval_in(param.shape)
                if interval is None:
                    copies.clear()
                    break
                copies.setdefault(self._copy_of(param, index), []).append((index, interval))
            self._holdings[param] = list(copies.values())
        return self._holdings[param]


def pieces_on(
    ranks: Ranks, params: Iterable[tuple[str, ParamPlacement]], rule: Rule | None
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
    for number, (name, placed) in enumerate(params):
        block_size = block_size_of(name, placed.shape, rule)
        copies = ranks.holdings(placed) if block_size and not ranks.is_alone else []
        cut = (pieces_of(placed.shape, copy, block_size) for copy in copies)
        choices = [one for one in cut if one is not None]
        if choices:
            own = min(choices, key=lambda one: sum(map(load.__getitem__, one.owners)))
            found[number] = own
            for block, owner in zip(own.blocks, own.owners, strict=True):
                load[owner] += block.numel
    return found


def _is_all(region: Region, block: OwnedBlock, full: Sequence[int]) -> bool:
    if region.numel < block.numel:
        return False
    overlaps = region.stretches(block.region(tuple(full)))
    return sum(one.numel for one in overlaps) == block.numel
