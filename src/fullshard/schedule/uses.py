"""The forward calls of one unit, by number: the open one, and those whose backward may come."""

from __future__ import annotations


class Uses:
    """The uses of a unit with ``num_members`` modules, which share each use.

    Attributes:
        open: the use that is open, while a member is running or must still run; None without one.
        graphs: uses whose backward may come -> number of times that it has come.
    """

    __slots__ = ("_generation", "_num_members", "_waiting", "graphs", "open")

    def __init__(self, num_members: int) -> None:
        self.open: int | None = None
        self.graphs: dict[int, int] = {}
        self._generation = 0  # of the weights that the forwards of ``graphs`` read
        self._num_members = num_members
        self._waiting: set[int] = set()  # members that must still run

    def enter(self, use: int) -> None:
        """Open a use."""
        self.open = use
        self._waiting = set(range(self._num_members))

    def ran(self, member: int) -> bool:
        """Take note that a member ran in the open use; return whether all have."""
        self._waiting.discard(member)
        return not self._waiting

    def forget_past(self, generation: int) -> None:
        """Forget uses whose backward came, or cannot come because the weights changed."""
        if self.graphs:
            current = self._generation == generation
            self.graphs = {u: 0 for u, times in self.graphs.items() if current and not times}
        self._generation = generation

    def forget_from(self, first: int) -> None:
        """Forget the uses from number ``first`` on."""
        self.graphs = {use: times for use, times in self.graphs.items() if use < first}

    def is_earliest(self, use: int) -> bool:
        """Return whether a backward inside ``use`` will not enter an earlier use of the unit.

        All ranks get the same answer, because they run the same forwards and backwards.
        """
        graphs = self.graphs
        if len(graphs) == 1:
            return use in graphs
        times = graphs.get(use)
        return times is not None and all(graphs[u] >= times for u in graphs if u < use)
