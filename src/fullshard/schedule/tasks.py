"""The backward calls that are under way."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Task:
    """One backward call: the uses that it is inside of, and the reductions that are due.

    ``first_use`` is the number of the first use that may begin during the call.
    """

    first_use: int
    open_uses: dict[int, int] = field(default_factory=dict)
    """Use -> unit, in the order in which backward entered them."""
    entered: dict[int, None] = field(default_factory=dict)
    """Units, in the order in which backward entered them."""
    dealt_with: set[int] = field(default_factory=set)
    """Units that were reduced, or need no reduction."""
    due: set[int] = field(default_factory=set)
    """Units to reduce when this task leaves their earliest use."""
    recomputed: set[int] = field(default_factory=set)
    """Units of which the call ran a forward again."""

    def is_inside(self, unit: int) -> bool:
        """Return whether backward is inside a use of the unit."""
        return unit in self.open_uses.values()


class Tasks(dict[int, Task]):
    """The backward calls that are under way, by number; one may be nested in another."""

    def around(self, unit: int, nested: int) -> Task | None:
        """Return a task inside the unit, in which the task ``nested`` runs; None without one."""
        for number, task in self.items():  # a generator takes 1 us longer
            if number != nested and task.is_inside(unit):
                return task
        return None

    @property
    def unit(self) -> int | None:
        """The unit that backward is inside of; None if there is none."""
        inside = (unit for task in self.values() for unit in task.open_uses.values())
        return next(iter(reversed(list(inside))), None)
