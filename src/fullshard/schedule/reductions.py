"""The reductions in flight, and how many may be in flight at a time."""

from __future__ import annotations

from fullshard.schedule.actions import Action
from fullshard.schedule.residents import Actions
from fullshard.schedule.state import UnitState


class Reductions:
    """The reductions in flight: started in the order of backward, finished in the same order.

    Each reduction holds a copy of its unit's gradients until the copy has been reduced over the
    shards. More reductions at a time cost memory; fewer make computation wait for communication.
    With replicas, a reduction continues over the replicas when another one needs its memory, and
    from then on holds one shard.

    ``open`` is True if a backward has begun since all reductions were ended. ``awaited`` is the
    index of the finalization whose handle will end the reductions, or None.
    """

    def __init__(self) -> None:
        self._in_flight: dict[int, list[Action]] = {}  # unit -> actions still to be done
        self._held: dict[int, int] = {}  # units in flight that hold a copy -> bytes of that copy
        self.open = False
        self.awaited: int | None = None
        self._num_left = 0

    def __len__(self) -> int:
        return len(self._in_flight)

    def start(self, state: UnitState, out: Actions, budget: int | None) -> None:
        """Reduce the unit's gradients, or keep them unsharded if the user asked for that.

        Before a reduction, let the oldest ones continue until their copies and this unit's copy
        take at most ``budget`` bytes together; if ``budget`` is None, all of them continue.
        """
        policy, do = state.policy, state.do
        state.pending = not policy.requires_gradient_sync
        if state.pending:
            out.append(do.accumulate)
            return
        while state.key in self._in_flight:
            self._end(next(iter(self._in_flight)), out)
        for unit in [unit for unit in self._in_flight if unit not in self._held]:
            self._end(unit, out)  # its all-reduce began no later than the previous reduction
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

    def start_waiting(self, state: UnitState, out: Actions, budget: int | None) -> None:
        """Reduce pending and partial gradients of the unit, as far as its policy allows now."""
        policy = state.policy
        if state.pending and policy.requires_gradient_sync:
            self.start(state, out, budget)
        if state.partial and policy.requires_all_reduce and policy.requires_gradient_sync:
            state.partial = False
            out.append(state.do.all_reduce)
            self._in_flight[state.key] = [state.do.finish_reduce]
            self._held.pop(state.key, None)

    def finish(self, out: Actions) -> None:
        """End all reductions."""
        for unit in tuple(self._held):
            self._go_on(unit, out)
        for unit in tuple(self._in_flight):
            self._end(unit, out)
        self.open = False
        self.awaited = None

    def leave(self) -> None:
        """Leave all reductions to a handle that will end them."""
        self.awaited = self._num_left
        self._num_left += 1

    def _go_on(self, unit: int, out: Actions) -> None:
        """End the unit's reduction over the shards, which frees the copy of its gradients."""
        del self._held[unit]
        to_do = self._in_flight[unit]
        out.append(to_do.pop(0))
        if not to_do:
            del self._in_flight[unit]

    def _end(self, unit: int, out: Actions) -> None:
        self._held.pop(unit, None)
        out += self._in_flight.pop(unit)
