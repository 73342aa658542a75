"""Reductions under way, and how many at a time."""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.schedule.residents import Actions
from fullshard.schedule.state import UnitState

__all__ = ["Reductions"]


@dataclass(slots=True)
class _Reduction:
    """One reduction that was started."""

    state: UnitState
    over_replicas: bool
    """Whether the reduction over replicas is still to come."""
    stays_partial: bool = False
    """Whether it ends without one."""


class Reductions:
    """Started in the order of backward, finished in the same; only so many in flight.

    Each holds a copy of its unit's gradients, so more at a time cost memory, and fewer than two
    make the next one wait. Where there are replicas, a reduction goes on to them when the next one
    starts, so that waiting for its first half costs nothing.
    """

    def __init__(self) -> None:
        self._in_flight: dict[int, _Reduction] = {}

    def __len__(self) -> int:
        return len(self._in_flight)

    def start(self, state: UnitState, out: Actions, *, most: int) -> None:
        """Reduce what the unit has, or keep it where the user asked for that.

        ``most`` reductions are under way then.
        """
        policy = state.policy
        state.pending = not policy.requires_gradient_sync
        if state.pending:
            out.append(state.do.accumulate)
            return
        while len(self._in_flight) >= most or state.key in self._in_flight:
            self._finish(self._in_flight.pop(next(iter(self._in_flight))), out)
        for reduction in self._in_flight.values():
            _go_on(reduction, out)
        out.append(state.do.reduce_scatter)
        state.partial = state.replicated and not policy.requires_all_reduce
        self._in_flight[state.key] = _Reduction(
            state, state.replicated and policy.requires_all_reduce, state.partial
        )

    def end_partial(self, state: UnitState, out: Actions) -> None:
        """Reduce over replicas what was kept partial, if the user no longer asks for that."""
        policy = state.policy
        if state.partial and policy.requires_all_reduce and policy.requires_gradient_sync:
            state.partial = False
            out.append(state.do.all_reduce)
            self._in_flight[state.key] = _Reduction(state, over_replicas=False)

    def finish(self, out: Actions) -> None:
        """End all of them."""
        for reduction in self._in_flight.values():
            _go_on(reduction, out)
        for reduction in self._in_flight.values():
            self._finish(reduction, out)
        self._in_flight.clear()

    def _finish(self, reduction: _Reduction, out: Actions) -> None:
        _go_on(reduction, out)
        do = reduction.state.do
        out.append(do.keep_partial if reduction.stays_partial else do.finish_reduce)


def _go_on(reduction: _Reduction, out: Actions) -> None:
    """Start the second half, if it has one."""
    if reduction.over_replicas:
        reduction.over_replicas = False
        out.append(reduction.state.do.all_reduce)
