"""Reductions under way, and how many at a time."""

from __future__ import annotations

from fullshard.schedule.actions import Action
from fullshard.schedule.residents import Actions
from fullshard.schedule.state import UnitState

__all__ = ["Reductions"]


class Reductions:
    """Started in the order of backward, finished in the same; only so many in flight.

    Each holds a copy of its unit's gradients, so more at a time cost memory, and fewer than two
    make the next one wait. Where there are replicas, a reduction goes on to them when the next one
    starts, so that waiting for its first half costs nothing.

    ``open``: a backward has begun since all of them were ended. ``awaited`` is the number of the
    finalization whose handle is to end them, if there is one.
    """

    def __init__(self) -> None:
        self._in_flight: dict[int, list[Action]] = {}  # unit -> what is still to be done
        self.open = False
        self.awaited: int | None = None
        self._num_left = 0

    def __len__(self) -> int:
        return len(self._in_flight)

    def start(self, state: UnitState, out: Actions, *, most: int) -> None:
        """Reduce what the unit has, or keep it where the user asked for that.

        ``most`` reductions are under way then.
        """
        policy, do = state.policy, state.do
        state.pending = not policy.requires_gradient_sync
        if state.pending:
            out.append(do.accumulate)
            return
        while len(self._in_flight) >= most or state.key in self._in_flight:
            out += self._in_flight.pop(next(iter(self._in_flight)))
        self._go_on(out)
        out.append(do.reduce_scatter)
        state.partial = state.replicated and not policy.requires_all_reduce
        if state.partial:
            to_do = [do.keep_partial]
        else:
            to_do = [do.all_reduce, do.finish_reduce] if state.replicated else [do.finish_reduce]
        self._in_flight[state.key] = to_do

    def end_partial(self, state: UnitState, out: Actions) -> None:
        """Reduce over replicas what was kept partial, if the user no longer asks for that."""
        policy = state.policy
        if state.partial and policy.requires_all_reduce and policy.requires_gradient_sync:
            state.partial = False
            out.append(state.do.all_reduce)
            self._in_flight[state.key] = [state.do.finish_reduce]

    def finish(self, out: Actions) -> None:
        """End all of them."""
        self._go_on(out)
        for to_do in self._in_flight.values():
            out += to_do
        self._in_flight.clear()
        self.open = False
        self.awaited = None

    def leave(self) -> None:
        """Leave it to a handle to end them."""
        self.awaited = self._num_left
        self._num_left += 1

    def _go_on(self, out: Actions) -> None:
        """Start the second halves of those that have one."""
        for to_do in self._in_flight.values():
            out += to_do[:-1]
            del to_do[:-1]
