"""What the machine remembers: of a unit, of a running forward, of a running backward."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fullshard.errors import ProtocolError
from fullshard.schedule.actions import UnitActions, actions_of


class Residency(enum.IntEnum):
    """Where the unsharded parameters of a unit are."""

    SHARDED = 0
    """Nowhere: only the shard exists."""
    SECONDARY = 1
    """Nowhere, but a few ranks have all of them in slices."""
    GATHERING = 2
    """On their way: the all-gather was started."""
    UNSHARDED = 3
    """In memory, shown by the modules."""
    CONCEALED = 4
    """In memory, for a backward that may come or to be freed late; the modules show the sharded
    parameters."""


_GATHERING = Residency.GATHERING

MOVES = frozenset(
    {
        (Residency.SHARDED, Residency.GATHERING),
        (Residency.GATHERING, Residency.UNSHARDED),
        (Residency.UNSHARDED, Residency.SHARDED),
        (Residency.UNSHARDED, Residency.SECONDARY),
        (Residency.SECONDARY, Residency.GATHERING),
        (Residency.SECONDARY, Residency.SHARDED),
        (Residency.UNSHARDED, Residency.GATHERING),  # refresh of a stale copy, in place
        (Residency.UNSHARDED, Residency.CONCEALED),
        (Residency.CONCEALED, Residency.UNSHARDED),
        (Residency.CONCEALED, Residency.GATHERING),
        (Residency.CONCEALED, Residency.SHARDED),
        (Residency.CONCEALED, Residency.SECONDARY),
    }
)
"""The only moves; an all-gather that was started is always waited for, a wrong guess too."""


class Hold:
    """Why a unit is unsharded; a unit's holds are the sum of these bits.

    Plain ints: to look up a member of an enum, several times a trigger, took a tenth of the
    scheduler's time.
    """

    FORWARD = 1 << 0
    """A use is running its forward."""
    BACKWARD = 1 << 1
    """A use is running its backward."""
    RECOMPUTE = 1 << 2
    """An activation checkpoint ran the forward again; its backward comes next."""
    KEEP = 1 << 3
    """Policy: not resharded after forward, or not after backward."""
    HIDDEN = 1 << 4
    """Gradients may come back by a way that we do not see, and so nobody can tell when they all
    have; it lasts until the weights are others."""
    USER = 1 << 5
    """``unshard()``."""
    GUESS = 1 << 6
    """Prefetched."""
    LATE = 1 << 7
    """Left, but freed only once the next gather has begun, see ``Residents.put_off``."""


IN_USE = Hold.FORWARD | Hold.BACKWARD | Hold.RECOMPUTE


class AfterForward(enum.Enum):
    """What becomes of the unsharded parameters after forward."""

    AUTO = "auto"
    """Kept if the unit is the root of the forward, else freed."""
    RESHARD = "reshard"
    """Freed, gathered again in backward."""
    SECONDARY = "secondary"
    """Freed but for a slice, from which a smaller group gathers them again in backward."""
    KEEP = "keep"
    """Kept until after backward."""


@dataclass(frozen=True, slots=True)
class UnitPolicy:
    """What the user chose for a unit; replaced as a whole, never changed."""

    after_forward: AfterForward = AfterForward.AUTO
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    """Whether gradients are reduced over replicas, or, where there are any, kept partial."""
    unshard_in_backward: bool = True
    """False promises that no backward of the unit reads its parameters, as an embedding's."""
    forward_prefetch: tuple[int, ...] = ()
    """Units to gather when this one enters forward, instead of what the learned order says."""
    backward_prefetch: tuple[int, ...] = ()
    """The same in backward."""

    def renumbered(self, key_of: Mapping[int, int]) -> UnitPolicy:
        """This policy where units have other keys, and those without are gone."""
        return replace(
            self,
            forward_prefetch=tuple(key_of[u] for u in self.forward_prefetch if u in key_of),
            backward_prefetch=tuple(key_of[u] for u in self.backward_prefetch if u in key_of),
        )


class Ahead(enum.Enum):
    """When the backward of a unit gathers what comes next."""

    AT_START = enum.auto()
    """Before it computes gradients, so that communication has all of that time."""
    AT_END = enum.auto()
    """Once it is left and resharded, before its gradients are reduced: no two units are whole."""
    NEVER = enum.auto()


@dataclass(frozen=True, slots=True)
class MachinePolicy:
    """What the user chose for all units together."""

    prefetch_budget: int | None = None
    """Unsharded bytes (the root's apart) up to which units are gathered ahead; None: one unit."""
    backward_ahead: Ahead = Ahead.AT_START
    is_last_backward: bool = True
    """Whether the end of a backward also ends the reductions."""
    manual_finalization: bool = False
    """Whether, instead, ``Finalize`` reduces what is pending and ends the reductions."""
    reduction_budget: int | None = None
    """Bytes that reductions under way may hold together, each a copy of its unit's gradients;
    None: one at a time does."""


@dataclass(slots=True)
class UnitState:
    """One unit in the machine.

    ``nbytes`` are the unsharded bytes, ``reduction_nbytes`` those that a reduction holds as long as
    it is under way over the shards; ``num_members`` are the modules that share the unit;
    ``encloses``: there are units inside of its modules; ``replicated``: other ranks hold the same
    shards, and gradients are reduced over them too.
    """

    key: int
    nbytes: int
    reduction_nbytes: int = 0
    num_members: int = 1
    encloses: bool = False
    replicated: bool = False
    policy: UnitPolicy = UnitPolicy()
    residency: Residency = Residency.SHARDED
    holds: int = 0
    pending: bool = False
    """Whether gradients wait, unsharded, for a backward that reduces."""
    partial: bool = False
    """Whether gradients wait, reduced over shards, to be reduced over replicas."""
    generation: int = 0
    """The generation of the weights in the unsharded copy."""
    use: int | None = None
    """The open use, while a member is running or has still to run."""
    waiting_members: set[int] = field(default_factory=set)
    graph_uses: dict[int, int] = field(default_factory=dict)
    """Uses whose backward may come -> how often it has come."""
    graph_generation: int = 0
    """The generation of the weights in the forwards of these uses."""
    do: UnitActions = field(init=False)

    def __post_init__(self) -> None:
        self.do = actions_of(self.key)

    @property
    def is_held(self) -> bool:
        """Whether the unsharded parameters are in memory, or on their way there."""
        return self.residency >= _GATHERING

    def move(self, to: Residency) -> None:
        """Change the residency; the one place where that happens."""
        if (self.residency, to) not in MOVES:
            raise ProtocolError(
                f"unit {self.key} cannot go from {self.residency.name} to {to.name}: "
                "this is a defect of the scheduler, please report it"
            )
        self.residency = to

    def forget_past_uses(self, generation: int) -> None:
        """Forget the uses whose backward came, or cannot come as the weights are others."""
        if self.graph_uses:
            current = self.graph_generation == generation
            self.graph_uses = {
                u: 0 for u, times in self.graph_uses.items() if current and not times
            }
        self.graph_generation = generation

    def is_earliest(self, use: int) -> bool:
        """Whether a backward that is inside ``use`` will not enter an earlier use of the unit.

        All ranks agree on it, as they run the same forwards and backwards.
        """
        uses = self.graph_uses
        if len(uses) == 1:
            return use in uses
        times = uses.get(use)
        return times is not None and all(uses[u] >= times for u in uses if u < use)


@dataclass(slots=True)
class Task:
    """One backward call: the uses it is inside of, and the reductions that are due.

    ``first_use`` is the number of the first use that may begin in it.
    """

    first_use: int
    open_uses: dict[int, int] = field(default_factory=dict)
    """Use -> unit, in the order in which backward entered them."""
    entered: dict[int, None] = field(default_factory=dict)
    """Units, in that order."""
    dealt_with: set[int] = field(default_factory=set)
    """Units that were reduced, or need not be."""
    due: set[int] = field(default_factory=set)
    """Units to be reduced when this task leaves their earliest use."""
    recomputed: set[int] = field(default_factory=set)

    def is_inside(self, unit: int) -> bool:
        """Whether backward is inside a use of the unit."""
        return unit in self.open_uses.values()


@dataclass(slots=True)
class Iteration:
    """One root forward, from its enter to its exit: units in the order of entry and of exit."""

    root: int
    entered: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
