"""Which parameters can step as one tensor: the decision, without tensors.

memory       | w1 | b1 | w2 | b2 |  .  .  | w3 |
line            x    x    y    x              x     places of a line differ in number alone
runs           (w1   b1) (w2) (b2             w3)   neighbours on one line
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Place(NamedTuple):
    """Where a parameter stands.

    Attributes:
        line: all that members of a run have in common: their group, the buffers that they and
            their gradients lie in, how these are shifted against each other, the age of their
            state.
        number: the place in the order of memory; neighbours have numbers that follow. None: next
            to everyone on the line, as it takes no room.
    """

    line: Hashable
    number: int | None


def find_runs(places: Sequence[Place | None]) -> list[tuple[int, ...]]:
    """The fewest runs: each parameter is in one, and members of a run are neighbours on a line.

    Args:
        places: one for each parameter; None for one that has no neighbours. The numbers on a line
            are all None, or none is.

    Returns:
        Indexes into ``places``, in a run by place, runs by their first index.
    """
    lines: dict[Hashable, list[tuple[int, int]]] = {}
    runs: list[tuple[int, ...]] = []
    for index, place in enumerate(places):
        if place is None:
            runs.append((index,))
            continue
        line = lines.setdefault(place.line, [])
        line.append((len(line) if place.number is None else place.number, index))
    for line in lines.values():
        line.sort()
        cuts = [i for i, (one, two) in enumerate(pairwise(line), 1) if one[0] + 1 != two[0]]
        runs += [tuple(index for _, index in line[a:b]) for a, b in pairwise((0, *cuts, len(line)))]
    return sorted(runs)
