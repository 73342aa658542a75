"""Reductions under way, and how many at a time."""

from __future__ import annotations

from fullshard.schedule.actions import Action
from fullshard.schedule.residents import Actions
from fullshard.schedule.state import UnitState


class Reductions:
    """Started in the order of backward, finished in the same; only so many in flight.

    Each holds a copy of its unit's gradients until it is through with the shards: more at a time
    cost memory, fewer let computation wait for the wire. Where there are replicas, a reduction goes
    on to them when another one needs its memory, and what it holds from then on is one shard.

    ``open``: a backward has begun since all of them were ended. ``awaited`` is the number of the
    finalization whose handle is to end them, if there is one.
    """

    def __init__(self) -> None:
        self._in_flight: dict[int, list[Action]] = {}  # unit -> what is still to be done
        self._held: dict[int, int] = {}  # of these, those that hold a copy -> its bytes
        self.open = False
        self.awaited: int | None = None
        self._num_left = 0

    def __len__(self) -> int:
        return len(self._in_flight)

    def start(self, state: UnitState, out: Actions, budget: int | None) -> None:
        """Reduce what the unit has, or keep it where the user asked for that.

        Before that, the oldest go on until their copies and that of this unit are no more than
        ``budget`` bytes together; None: all go on.
        """
        policy, do = state.policy, state.do
        state.pending = not policy.requires_gradient_sync
        if state.pending:
            out.append(do.accumulate)
            return
        while state.key in self._in_flight:
            self._end(next(iter(self._in_flight)), out)
        for unit in [unit for unit in self._in_flight if unit not in self._held]:
            self._end(unit, out)  # reduced over the replicas while the one before this was started
        most = 0 if budget is None else budget - state.reduction_nbytes
        while self._held and (budget is None or sum(self._held.values()) > most):
            self._go_on(next(iter(self._held)), out)
        out.append(do.reduce_scatter)
        state.partial = state.replicated and not policy.requires_all_reduce
        if state.partial:
            to_do = [do.keep_partial]
        else:
            to_do = [do.all_reduce, do.finish_reduce] if state.replicated else [do.finish_reduce]
        self._in_flight[state.key] = to_do
        self._held[state.key] = state.reduction_nbytes

    def end_partial(self, state: UnitState, out: Actions) -> None:
        """Reduce over replicas what was kept partial, if the user no longer asks for that."""
        policy = state.policy
        if state.partial and policy.requires_all_reduce and policy.requires_gradient_sync:
            state.partial = False
            out.append(state.do.all_reduce)
            self._in_flight[state.key] = [state.do.finish_reduce]
            self._held.pop(state.key, None)

    def finish(self, out: Actions) -> None:
        """End all of them."""
        for unit in tuple(self._held):
            self._go_on(unit, out)
        for unit in tuple(self._in_flight):
            self._end(unit, out)
        self.open = False
        self.awaited = None

    def leave(self) -> None:
        """Leave it to a handle to end them."""
        self.awaited = self._num_left
        self._num_left += 1

    def _go_on(self, unit: int, out: Actions) -> None:
        """Give the copy of the unit's gradients back: end its reduction over the shards."""
        del self._held[unit]
        to_do = self._in_flight[unit]
        out.append(to_do.pop(0))
        if not to_do:
            del self._in_flight[unit]

    def _end(self, unit: int, out: Actions) -> None:
        self._held.pop(unit, None)
        out += self._in_flight.pop(unit)
