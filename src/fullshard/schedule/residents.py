"""The residencies of all units, and the few ways to change them."""

from __future__ import annotations

from fullshard.schedule.actions import FENCE, Action
from fullshard.schedule.state import IN_USE, AfterForward, Hold, Residency, UnitState

Actions = list[Action]

# Looking up an enum member takes longer than the work that needs the member.
_SHARDED, _SECONDARY, _GATHERING, _UNSHARDED, _CONCEALED = Residency


class Residents:
    """All units with their residencies; methods append the actions that they need to ``out``.

    ``generation`` counts how often the sharded weights may have changed; an unsharded copy made
    in an earlier generation is stale.
    """

    def __init__(self) -> None:
        self.units: dict[int, UnitState] = {}
        self.generation = 0
        self.root: UnitState | None = None
        self._late: tuple[UnitState, bool] | None = None  # the unit; True: to secondary
        self._held_nbytes = 0

    def held_nbytes(self) -> int:
        """Return the unsharded bytes, those being gathered included, the root's excluded."""
        if self.root is not None and self.root.is_held:
            return self._held_nbytes - self.root.moved_nbytes
        return self._held_nbytes

    def leading(self, unit: int) -> UnitState:
        """Return the unit that decides when ``unit`` moves: its carrier, or itself."""
        state = self.units[unit]
        return state.carrier or state

    def need(self, state: UnitState, out: Actions) -> None:
        """Make the unit unsharded, whatever its residency is."""
        state.holds &= ~Hold.GUESS
        if state.residency <= _SECONDARY:
            self.gather(state, out)
            self.end_late(out)
        if state.residency is not _UNSHARDED:
            self.wait(state, out)

    def begin(self, state: UnitState, out: Actions, *, fence: bool) -> None:
        """Start to gather the unit unless its copy is current, after a fence if asked."""
        gathers: Actions = []
        self.refresh(state, gathers)
        if not state.is_held:
            self.gather(state, gathers)
        out += [FENCE, *gathers] if gathers and fence else gathers

    def refresh(self, state: UnitState, out: Actions) -> None:
        """Gather the unit again, in place, if the weights changed since its copy was made.

        Do nothing in the middle of a forward or backward that reads the copy: its gradients belong
        to the weights that it started with.
        """
        if not state.is_held or state.generation == self.generation or (state.holds & IN_USE):
            return
        if state.residency is _GATHERING:
            self._move(state, _UNSHARDED, "finish_gather", out)
        self.gather(state, out)

    def gather(self, state: UnitState, out: Actions) -> None:
        """Start to unshard the unit."""
        if state.residency is _SECONDARY and state.generation != self.generation:
            self._drop_secondary(state, out)
        if state.residency <= _SECONDARY:
            self._held_nbytes += state.nbytes
        state.move(_GATHERING)
        state.generation = self.generation
        out.append(state.do.unshard)
        for one in state.carries:
            self.gather(one, out)

    def wait(self, state: UnitState, out: Actions) -> None:
        """Finish unsharding the unit, or show it again if it was concealed."""
        self._move(state, _UNSHARDED, "wait", out)

    def retain(self, state: UnitState, out: Actions) -> None:
        """Keep the unit's memory when it is resharded: a graph that we do not see may read it.

        Only some ranks may have such a graph. So the unit counts as sharded afterwards, and is
        gathered again in place, as on other ranks. The engine frees the memory.
        """
        out.extend(one.do.retain for one in (state, *state.carries))

    def release(
        self, state: UnitState, holds: int, out: Actions, *, to_secondary: bool = False
    ) -> None:
        """Drop ``holds`` of the unit, then settle it."""
        state.holds &= ~holds
        self.settle(state, out, to_secondary=to_secondary)

    def settle(self, state: UnitState, out: Actions, *, to_secondary: bool = False) -> None:
        """Reshard the unit if nothing holds it; conceal it if only ``late`` does."""
        if not state.residency or state.holds & ~Hold.LATE:
            return
        if state.residency is _SECONDARY:
            if not to_secondary:
                self._drop_secondary(state, out)
            return
        if state.residency is _GATHERING:  # a collective may still write into the buffer
            self._move(state, _UNSHARDED, "finish_gather", out)
        if not state.holds:
            self._free(state, out, to_secondary=to_secondary)
        elif state.residency is _UNSHARDED:
            self._move(state, _CONCEALED, "conceal", out)

    def put_off(self, state: UnitState, out: Actions, *, to_secondary: bool) -> None:
        """Add a hold so that the unit is freed only once the next gather has begun.

        Freeing waits for the unit's computation, and so do the gathers issued after it: if no
        gather was issued ahead, the next one would overlap with no computation.
        """
        if self._late is not None and self._late[0] is not state:
            self.end_late(out)
        state.holds |= Hold.LATE
        self._late = state, to_secondary

    def make_room(self, state: UnitState, budget: int | None, out: Actions) -> None:
        """Free the unit that was put off if ``state`` would exceed the budget together with it."""
        if self._late is None or budget is None or state.is_held:
            return
        if self.held_nbytes() + state.moved_nbytes > budget:
            self.end_late(out)

    def end_late(self, out: Actions) -> None:
        """Free the unit that was put off, if there is one."""
        if self._late is not None:
            (state, to_secondary), self._late = self._late, None
            self.release(state, Hold.LATE, out, to_secondary=to_secondary)

    def regroup(self) -> None:
        """Find the carrier of each unit that ranks may skip, once all units are sharded.

        A rank may skip the units inside of such a unit as well. So the unit and those inside have
        one carrier: the nearest unit around that every rank runs. The carrier gathers, frees and
        reduces them at moments that all ranks agree on, even if ranks run different ones.
        """
        around: list[UnitState] = []
        carried: dict[int, list[UnitState]] = {key: [] for key in self.units}
        for key in sorted(self.units, reverse=True):
            state = self.units[key]
            while around and key < around[-1].key - around[-1].num_inside:
                around.pop()
            nearest = around[-1] if around else None
            state.carrier = nearest and nearest.carrier
            if state.policy.skip_tolerant and state.carrier is None:
                state.carrier = nearest
            state.holds &= ~Hold.CARRIED
            if state.carrier is not None:
                state.holds |= Hold.CARRIED
                carried[state.carrier.key].append(state)
            around.append(state)
        for key, state in self.units.items():
            state.carries = tuple(reversed(carried[key]))

    def _move(self, state: UnitState, to: Residency, action: str, out: Actions) -> None:
        for one in (state, *state.carries):
            one.move(to)
            out.append(getattr(one.do, action))

    def _free(self, state: UnitState, out: Actions, *, to_secondary: bool) -> None:
        self._held_nbytes -= state.nbytes
        state.move(_SECONDARY if to_secondary else _SHARDED)
        out.append(state.do.reshard_to_secondary if to_secondary else state.do.reshard)
        for one in state.carries:  # not all of them may have a smaller group of ranks
            smaller = to_secondary and one.policy.after_forward is AfterForward.SECONDARY
            self._free(one, out, to_secondary=smaller)

    def _drop_secondary(self, state: UnitState, out: Actions) -> None:
        state.move(_SHARDED)
        out.append(state.do.reshard)
        for one in state.carries:
            if one.residency is _SECONDARY:
                self._drop_secondary(one, out)
