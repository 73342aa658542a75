"""Which rank speaks for its circle to which rank of another circle: numbers only, no process group.

A *circle* is a set of ranks that read each other's memory, such as the ranks of a host. For each
rank outside of a circle, one rank of the circle is its *agent*: it receives what that rank gives to
all, once for the circle, and it adds up what the circle gives to that rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Routes", "circles_of"]


def circles_of(keys: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks with equal keys, by circle; circles are in the order of their first rank."""
    circles: dict[Hashable, list[int]] = {}
    for rank, key in enumerate(keys):
        circles.setdefault(key, []).append(rank)
    return tuple(map(tuple, circles.values()))


@dataclass(frozen=True)
class Routes:
    """The agents of all circles, seen from ``rank``."""

    circles: tuple[tuple[int, ...], ...]
    """Every rank once, each circle in ascending order."""
    rank: int

    @cached_property
    def world(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.circles))

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The circle of this rank."""
        return next(circle for circle in self.circles if self.rank in circle)

    @cached_property
    def others(self) -> tuple[tuple[int, ...], ...]:
        """The circles of other ranks."""
        return tuple(circle for circle in self.circles if circle != self.own)

    def agent(self, circle: tuple[int, ...], outsider: int) -> int:
        """Return the agent of ``outsider`` in ``circle``; agents have equal numbers of outsiders.

        Outsiders take turns in the order of their ranks, so that on hosts of equally many ranks
        any two ranks are either agents of each other or have nothing to send to each other.
        """
        return circle[(outsider - sum(rank < outsider for rank in circle)) % len(circle)]

    @cached_property
    def own_agents(self) -> tuple[int, ...]:
        """The agents of this rank, one in each of the other circles."""
        return tuple(self.agent(circle, self.rank) for circle in self.others)

    @cached_property
    def agent_of(self) -> dict[int, int]:
        """The agent in our circle of each outsider, by rank of the outsider."""
        outsiders = sorted(rank for circle in self.others for rank in circle)
        return {rank: self.agent(self.own, rank) for rank in outsiders}

    @cached_property
    def outsiders(self) -> tuple[int, ...]:
        """The outsiders whose agent this rank is."""
        return tuple(rank for rank, agent in self.agent_of.items() if agent == self.rank)

    @cached_property
    def partners(self) -> tuple[int, ...]:
        """The ranks of other circles that this rank exchanges messages with."""
        return tuple(sorted({*self.own_agents, *self.outsiders}))
