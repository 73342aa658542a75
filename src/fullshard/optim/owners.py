"""Decide which rank steps which matrix, from shapes and costs alone; imports no torch.

A parameter is stepped as one matrix, or, by a rule, as several *blocks*: rows of it that are
matrices of their own, or *pieces*, vectors of as many elements as lie on a rank, cut between
multiples of a number of elements. All of these are intervals of the parameter's elements.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeGuard

from fullshard.errors import ConfigError
from fullshard.layout.region import Interval, Region
from fullshard.layout.region import whole as all_of

Shape = tuple[int, ...]
Cost = Callable[[Shape], float]
Rule = int | Callable[[str, Shape], "str | int | Sequence[int] | None"]
"""A function from a parameter's name and shape to its blocks, see ``blocks_of``; or a number of
elements for all parameters."""

SLACK = 1.05
"""The largest load, as a multiple of the least possible one, at which a matrix may stay."""

_NS_STEPS = 5


class OwnedBlock(NamedTuple):
    """What one rank steps as one tensor: all, some rows, or a piece of a parameter.

    Attributes:
        param: number of the parameter.
        shape: shape of the tensor.
        start: the parameter's elements before it, in row-major order.
        grain: of a piece, the elements of a multiple of which it begins; else 0.
    """

    param: int
    shape: Shape
    start: int = 0
    grain: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def region(self, whole: Shape) -> Region:
        """Return its elements in a parameter of shape ``whole``."""
        return all_of(whole).part(self.start, self.start + self.numel)


def newton_schulz_flops(shape: Shape) -> float:
    """Return the operations of five Newton-Schulz steps, and of ten per element beside them.

    A matrix of three or more dims counts as its first dim times all others; with fewer than two
    dims there is nothing to orthogonalise.
    """
    numel = math.prod(shape)
    if len(shape) < 2 or not numel:
        return 10.0 * numel
    short, long = sorted((shape[0], numel // shape[0]))
    return 10.0 * numel + _NS_STEPS * (4.0 * short * short * long + 2.0 * short**3)


def blocks_of(param: int, name: str, shape: Shape, rule: Rule | None) -> list[OwnedBlock]:
    """Return the blocks of a parameter, in the order of its elements.

    The rule returns None: the parameter is one matrix; "each": each index of the first dim is one,
    with one dim less, as in a stack of experts; or numbers of rows: so many rows each, as in
    queries, keys and values that are one parameter.

    Raises:
        ConfigError: the rule returns anything else, or rows that do not add up.
    """
    wanted = _wanted(name, shape, rule)
    if wanted is None or _is_count(wanted):
        return [OwnedBlock(param, shape)]
    if shape and (wanted == "each" or _are_rows(wanted, shape[0])):
        each = wanted == "each"
        counts = [1] * shape[0] if each else [*map(int, wanted)]  # type: ignore[arg-type]
        inner, found, row = shape[1:], [], 0
        for count in counts:
            own = inner if each else (count, *inner)
            found.append(OwnedBlock(param, own, row * math.prod(inner)))
            row += count
        return found
    raise ConfigError(
        f"blocks: the rule returned {wanted!r} for {name or 'a parameter'} of shape {shape}; "
        'expected None, "each", numbers of rows above 0 that add up to its first dim, or a number '
        "of elements"
    )


def grain_of(name: str, shape: Shape, rule: Rule | None) -> int:
    """Return the number of elements that the rule returns, 0 if it says something else."""
    wanted = _wanted(name, shape, rule)
    return wanted if _is_count(wanted) else 0


def _wanted(name: str, shape: Shape, rule: Rule | None) -> str | int | Sequence[int] | None:
    return rule if rule is None or isinstance(rule, int) else rule(name, shape)


def _is_count(wanted: object) -> TypeGuard[int]:
    return isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0


def pieces_of(
    param: int, shape: Shape, holdings: Sequence[tuple[int, Interval]], grain: int
) -> tuple[list[OwnedBlock], list[int]] | None:
    """Return the pieces of a parameter and their owners, the ranks that hold (most of) them.

    Each cut is moved to the nearest multiple of ``grain`` elements. What no cut is left in is a
    matrix, at the rank that holds (most of) it.

    Args:
        param: number of the parameter.
        shape: its shape.
        holdings: ranks that together hold one copy of it, each with the elements that it holds.
        grain: a number of elements.

    Returns:
        None if it is empty, or ranks hold elements in another order than theirs.
    """
    numel = math.prod(shape)
    held = sorted((one for one in holdings if one[1].length), key=lambda one: one[1].start)
    ranks = [rank for rank, _ in held]
    if not held or ranks != sorted(ranks) or sum(one.length for _, one in held) != numel:
        return None
    cuts = [(one.start + grain // 2) // grain * grain for _, one in held] + [numel]
    lengths = [min(stop, numel) - start for start, stop in itertools.pairwise(cuts)]
    found = [one for one in zip(cuts, lengths, ranks, strict=False) if one[1] > 0]
    if len(found) == 1:
        return [OwnedBlock(param, shape)], [found[0][2]]
    blocks = [OwnedBlock(param, (length,), start, grain) for start, length, _ in found]
    return blocks, [rank for _, _, rank in found]


def _are_rows(wanted: object, size: int) -> bool:
    if isinstance(wanted, str) or not isinstance(wanted, Sequence):
        return False
    return all(isinstance(one, int) and one > 0 for one in wanted) and sum(wanted) == size


class Matrix(NamedTuple):
    """What the choice of an owner depends on.

    Attributes:
        param: number of the parameter of which it is a block.
        cost: of one step, in any unit.
        homes: ranks that hold all of it, one in each copy of the parameter.
    """

    param: int
    cost: float
    homes: tuple[int, ...] = ()


def owners_of(
    matrices: Sequence[Matrix], num_ranks: int, loads: Mapping[int, float] | None = None
) -> list[int]:
    """Return the rank that owns each matrix; a function of its arguments, equal on all ranks.

    Costly matrices first, each goes to the rank with the least to do. A matrix that a rank holds
    whole stays there, so that nothing travels, unless that rank had more than ``SLACK`` times the
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
        cost, homes = matrices[at].cost, matrices[at].homes
        rank = min(homes, key=lambda home: (load[home], home), default=-1)
        if rank < 0 or load[rank] + cost > limit:
            while idlest[0][0] < load[idlest[0][1]]:  # has got a matrix since
                heapq.heapreplace(idlest, (load[idlest[0][1]], idlest[0][1]))
            rank = idlest[0][1]
        owners[at] = rank
        load[rank] += cost
    return _in_order(matrices, owners)


def _in_order(matrices: Sequence[Matrix], owners: Sequence[int]) -> list[int]:
    """Return the owners, those of the blocks of each parameter sorted."""
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
