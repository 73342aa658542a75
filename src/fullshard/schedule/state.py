"""The state of the machine: of each unit, of a running forward and of running backwards."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import Any

from fullshard.errors import ProtocolError
from fullshard.schedule.actions import actions_of


class Residency(enum.IntEnum):
    """The place of a unit's unsharded parameters."""

    SHARDED = 0
    """Not in memory: only the shard exists."""
    SECONDARY = 1
    """Not in memory, but a few ranks hold all of them together as secondary shards."""
    GATHERING = 2
    """Being gathered: the all-gather was started."""
    UNSHARDED = 3
    """In memory and shown by the modules, unless it is freed, concealed or gathered next."""
    CONCEALED = 4
    """In memory until they are freed late; the modules show the sharded parameters."""


_SHARDED, _SECONDARY, _GATHERING, _UNSHARDED, _CONCEALED = Residency

MOVES = {
    _SHARDED: {_GATHERING},
    _SECONDARY: {_SHARDED, _GATHERING},
    _GATHERING: {_UNSHARDED},
    _UNSHARDED: {_SHARDED, _SECONDARY, _GATHERING, _CONCEALED},  # a stale copy is gathered in place
    _CONCEALED: {_SHARDED, _SECONDARY, _GATHERING, _UNSHARDED},
}
"""The only moves; every all-gather that was started is waited for, even after a wrong guess."""


class Hold:
    """Reasons for a unit to stay unsharded, as bits; a unit's holds are their sum.

    The bits are plain ints: looking up enum members several times per trigger took a tenth of the
    scheduler's time.
    """

    FORWARD = 1 << 0
    """A use is running its forward."""
    BACKWARD = 1 << 1
    """A use is running its backward."""
    RECOMPUTE = 1 << 2
    """An activation checkpoint ran the forward again; the backward of the use comes next."""
    KEEP = 1 << 3
    """The policy keeps the unit unsharded after forward, or after backward."""
    USER = 1 << 4
    """The user called ``unshard()``."""
    GUESS = 1 << 5
    """The unit was prefetched."""
    LATE = 1 << 6
    """The use was left; the unit is freed once the next gather begins (``Residents.put_off``)."""
    CARRIED = 1 << 7
    """The unit moves with its carrier, so nothing else frees it (``Residents.regroup``)."""


IN_USE = Hold.FORWARD | Hold.BACKWARD | Hold.RECOMPUTE


class AfterForward(enum.Enum):
    """The fate of the unsharded parameters after forward."""

    AUTO = "auto"
    """Kept if the unit is the root of the forward, freed otherwise."""
    RESHARD = "reshard"
    """Freed, and gathered again in backward."""
    SECONDARY = "secondary"
    """Freed except for a secondary shard, from which a smaller group gathers them in backward."""
    KEEP = "keep"
    """Kept until after backward."""


@dataclass(frozen=True, slots=True)
class UnitPolicy:
    """The user's choices for a unit; a frozen value, replaced to change a choice."""

    after_forward: AfterForward = AfterForward.AUTO
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    """True if gradients are reduced over replicas; if False, they are kept partial instead."""
    unshard_in_backward: bool = True
    """False promises that the unit's backward reads no parameter, as for an embedding."""
    forward_prefetch: tuple[int, ...] = ()
    """Units to gather when this unit enters forward, instead of the next one in learned order."""
    backward_prefetch: tuple[int, ...] = ()
    """Units to gather when this unit enters backward, in the same way."""
    skip_tolerant: bool = False
    """True if each rank may skip the unit, repeat it or run it in an order of its own."""

    def keeps(self, is_root: bool) -> bool:
        """Return whether the unit stays unsharded after its forward."""
        if self.after_forward is AfterForward.AUTO:
            return is_root
        return self.after_forward is AfterForward.KEEP

    def renumbered(self, key_of: Mapping[int, int]) -> UnitPolicy:
        """Return this policy with unit keys mapped by ``key_of``; drop units missing from it."""
        return replace(
            self,
            forward_prefetch=tuple(key_of[u] for u in self.forward_prefetch if u in key_of),
            backward_prefetch=tuple(key_of[u] for u in self.backward_prefetch if u in key_of),
        )


class Ahead(enum.Enum):
    """The moment in a unit's backward at which the next unit is gathered."""

    AT_START = enum.auto()
    """Before the unit computes gradients, so that communication overlaps with all of it."""
    AT_END = enum.auto()
    """After the unit is resharded, before its reduction: two units are never unsharded at once."""
    NEVER = enum.auto()


@dataclass(frozen=True, slots=True)
class MachinePolicy:
    """The user's choices for all units together."""

    prefetch_budget: int | None = None
    """Unsharded bytes (without the root's) up to which units are gathered ahead; None: one unit."""
    backward_ahead: Ahead = Ahead.AT_START
    is_last_backward: bool = True
    """True if the end of a backward also ends the reductions."""
    manual_finalization: bool = False
    """True if ``Finalize`` reduces pending gradients and ends the reductions instead."""
    reduction_budget: int | None = None
    """Bytes that reductions in flight may hold together, each a copy of its unit's gradients;
    None: one reduction at a time holds a copy."""

    def joined(self, other: MachinePolicy) -> MachinePolicy:
        """Return the choices of both; where both differ from the default, that of ``other``."""
        default = MachinePolicy()
        names = (field.name for field in fields(self))
        values = {name: getattr(other, name) for name in names}
        return replace(self, **{n: v for n, v in values.items() if v != getattr(default, n)})


class Uses:
    """The forward calls of a unit, by index; its ``num_members`` modules share each.

    Attributes:
        open: the use of which a member is running or must still run; None if there is none.
        graphs: uses whose backward may come -> number of times that it has come.
    """

    __slots__ = ("_generation", "_members", "_waiting", "graphs", "open")

    def __init__(self, num_members: int) -> None:
        self.open: int | None = None
        self.graphs: dict[int, int] = {}
        self._generation = 0  # of the weights that the forwards of ``graphs`` read
        self._members = set(range(num_members))
        self._waiting: set[int] = set()  # members that must still run

    def enter(self, use: int) -> None:
        """Open a use."""
        self.open = use
        self._waiting = self._members.copy()

    def ran(self, member: int) -> bool:
        """Record that a member ran in the open use; return whether all members have."""
        self._waiting.discard(member)
        return not self._waiting

    def forget_past(self, generation: int) -> None:
        """Forget uses whose backward came, or cannot come because the weights changed."""
        if self.graphs:
            current = self._generation == generation
            self.graphs = {u: 0 for u, times in self.graphs.items() if current and not times}
        self._generation = generation

    def forget_from(self, first: int) -> None:
        """Forget the uses from index ``first`` on."""
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


@dataclass(slots=True)
class UnitState:
    """The state of one unit in the machine.

    ``nbytes`` counts the unsharded bytes. ``reduction_nbytes`` counts the bytes that a reduction
    holds until it has been reduced over the shards. ``num_members`` counts the modules that share
    the unit. ``num_inside`` counts the units inside its modules, which have the keys just below.
    ``replicated`` is True if other ranks hold the same shards, so that gradients are reduced over
    those ranks too.
    """

    key: int
    nbytes: int
    reduction_nbytes: int = 0
    num_members: InitVar[int] = 1
    num_inside: int = 0
    replicated: bool = False
    policy: UnitPolicy = UnitPolicy()
    residency: Residency = Residency.SHARDED
    holds: int = 0
    pending: bool = False
    """True if unsharded gradients wait for a backward that reduces."""
    partial: bool = False
    """True if gradients that are reduced over shards wait to be reduced over replicas."""
    generation: int = 0
    """The generation of the weights in the unsharded copy."""
    uses: Uses = field(init=False)
    carrier: UnitState | None = field(default=None, repr=False, compare=False)
    """The unit with which this one is gathered, freed and reduced; None: it moves by itself."""
    carries: tuple[UnitState, ...] = field(default=(), repr=False, compare=False)
    """The units of which this one is the carrier, by key."""
    do: Any = field(init=False)
    """The unit's actions, see ``actions_of``."""

    def __post_init__(self, num_members: int) -> None:
        self.uses = Uses(num_members)
        self.do = actions_of(self.key)

    @property
    def is_held(self) -> bool:
        """True if the unsharded parameters are in memory or being gathered."""
        return self.residency >= _GATHERING

    @property
    def moved_nbytes(self) -> int:
        """The unsharded bytes of the unit and of all units that it carries."""
        if not self.carries:
            return self.nbytes
        return self.nbytes + sum(one.nbytes for one in self.carries)

    def move(self, to: Residency) -> None:
        """Change the residency; nothing else may change it."""
        if to not in MOVES[self.residency]:
            raise ProtocolError(
                f"unit {self.key} cannot go from {self.residency.name} to {to.name}: "
                "this is a defect of the scheduler, please report it"
            )
        self.residency = to


@dataclass(slots=True)
class Task:
    """One backward call: the uses that it is inside of, and the reductions that are due.

    ``first_use`` is the index of the first use that may begin during the call.
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
    """The backward calls that are under way, by task; one may be nested in another."""

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


@dataclass(slots=True)
class Iteration:
    """One root forward from entry to exit: its units in the order of entry and of exit."""

    root: int
    entered: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
