"""Reductions under way, and how many at a time."""

from __future__ import annotations

from fullshard.schedule.residents import Actions
from fullshard.schedule.state import UnitState

__all__ = ["Reductions"]


class Reductions:
    """Started in the order of backward, finished in the same; one besides the newest in flight.

    Each holds a copy of its unit's gradients, so more at a time would cost memory, and fewer would
    make the next one wait.
    """

    def __init__(self) -> None:
        self._in_flight: dict[int, UnitState] = {}

    def __len__(self) -> int:
        return len(self._in_flight)

    def start(self, state: UnitState, out: Actions) -> None:
        """Reduce what the unit has, or keep it where the user asked for that."""
        state.pending = not state.policy.requires_gradient_sync
        if state.pending:
            out.append(state.do.accumulate)
            return
        while len(self._in_flight) > 1 or state.key in self._in_flight:
            out.append(self._in_flight.pop(next(iter(self._in_flight))).do.finish_reduce)
        out.append(state.do.reduce_scatter)
        self._in_flight[state.key] = state

    def finish(self, out: Actions) -> None:
        """End all of them."""
        out.extend(state.do.finish_reduce for state in self._in_flight.values())
        self._in_flight.clear()
