"""The decision which parameters can step as one tensor, made without tensors.

memory       | w1 | b1 | w2 | b2 |  .  .  | w3 |
line            x    x    y    x              x     positions on one line differ only in number
runs           (w1   b1) (w2) (b2             w3)   neighbors on one line
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Position(NamedTuple):
    """The position of a parameter in memory.

    Attributes:
        line: everything that members of a run have in common: their group, the buffers of
            parameters and of gradients, the shift between the two, the age of their state.
        number: the index in memory order; neighbors have consecutive numbers. None for a parameter
            without elements, which is a neighbor of all parameters on its line.
    """

    line: Hashable
    number: int | None


def find_runs(positions: Sequence[Position | None]) -> list[tuple[int, ...]]:
    """Split all parameters into the fewest runs whose members are neighbors on one line.

    Args:
        positions: one per parameter; None for a parameter without neighbors. On any one line either
            all numbers are None or none is.

    Returns:
        Runs of indices into ``positions``; each run is in memory order, runs by first member.
    """
    lines: dict[Hashable, list[tuple[int, int]]] = {}
    runs: list[tuple[int, ...]] = []
    for index, position in enumerate(positions):
        if position is None:
            runs.append((index,))
            continue
        line = lines.setdefault(position.line, [])
        line.append((len(line) if position.number is None else position.number, index))
    for line in lines.values():
        line.sort()
        cuts = [i for i, (one, two) in enumerate(pairwise(line), 1) if one[0] + 1 != two[0]]
        runs += [tuple(index for _, index in line[a:b]) for a, b in pairwise((0, *cuts, len(line)))]
    return sorted(runs)
