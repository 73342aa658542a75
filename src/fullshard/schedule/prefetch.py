"""Prefetch: guesses which unit comes next from the order of an earlier pass."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fullshard.schedule.residents import Actions, Residents
from fullshard.schedule.state import Ahead, Hold

_UNORDERED = sys.maxsize


class Prefetcher:
    """A guesser for one direction: gathers the units expected next, drops those that never came.

    A wrong guess costs a gather and memory for a moment, never correctness. ``budget`` is the
    number of unsharded bytes up to which units are gathered ahead; None means one unit ahead.
    """

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._order: tuple[int, ...] = ()
        self._next = 0  # the index after the last unit in the order that was entered
        self._guesses: dict[int, int] = {}  # unit -> position in the order
        self._due: int | None = None  # the unit whose end triggers the next guess

    def follow(self, units: Sequence[int]) -> None:
        """Predict with this order from now on."""
        self._order, self._next = tuple(units), 0

    def rewind(self) -> None:
        """Start the pass again at the first unit."""
        self._next = 0

    @property
    def is_blind(self) -> bool:
        """True if neither a learned order nor the user says which unit comes next."""
        return not self._order and not self._guesses

    def met(
        self,
        unit: int,
        budget: int | None,
        out: Actions,
        *,
        told: Sequence[int] = (),
        ahead: Ahead = Ahead.AT_START,
    ) -> None:
        """Record that ``unit`` was entered: drop skipped guesses and make new ones.

        If the user named units in ``told``, gather those; they never count as skipped.
        """
        position = self._advance(unit)
        if self._guesses:
            self._guesses.pop(unit, None)
            for skipped in [key for key, guess in self._guesses.items() if guess < position]:
                self._drop(skipped, out)
        self._due = unit if ahead is Ahead.AT_END else None
        if told:
            for next_unit in told:
                self._guess(_UNORDERED, next_unit, out)
        elif ahead is Ahead.AT_START:
            self._guess_more(unit, budget, out)

    def done(self, unit: int, budget: int | None, out: Actions) -> None:
        """Record that ``unit`` was left, and make the guess that was put off until then."""
        if self._due == unit:
            self._due = None
            self._guess_more(unit, budget, out)

    def give_up(self, out: Actions) -> None:
        """Drop the remaining guesses: the pass is over, so they were wrong."""
        self._due = None
        for unit in tuple(self._guesses):
            self._drop(unit, out)

    def _advance(self, unit: int) -> int:
        """Move past ``unit``, which was entered, and return its position (-1: not predicted)."""
        for start in (self._next, 0):  # search ahead first, then from the start: a second pass
            try:
                found = self._order.index(unit, start)
            except ValueError:
                continue
            self._next = found + 1
            return found
        return -1

    def _guess_more(self, current: int, budget: int | None, out: Actions) -> None:
        order, states = self._order, self._residents.units
        ahead = range(self._next, len(order))
        if budget is None:
            for position in ahead:
                if order[position] != current:
                    self._guess(position, order[position], out)
                    return
            return
        free_nbytes = budget - self._residents.held_nbytes()
        for position in ahead:
            unit = order[position]
            if states[unit].is_held:
                continue
            free_nbytes -= states[unit].moved_nbytes
            if free_nbytes < 0:
                return
            self._guess(position, unit, out)

    def _guess(self, position: int, unit: int, out: Actions) -> None:
        state = self._residents.leading(unit)
        if not state.is_held:
            self._residents.gather(state, out)
            state.holds |= Hold.GUESS
            self._guesses[state.key] = position

    def _drop(self, unit: int, out: Actions) -> None:
        del self._guesses[unit]
        self._residents.release(self._residents.units[unit], Hold.GUESS, out)
