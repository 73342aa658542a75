"""What happens to the machine: one immutable value per kind of event.

A ``task`` is one backward call of autograd, named by its number; ``NO_TASK`` means "outside of any
backward". A ``use`` is one forward call of a unit; the machine numbers them.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from fullshard.schedule.state import MachinePolicy, UnitPolicy

NO_TASK = -1
"""Autograd's own number for "no backward is running"."""


class Follows(enum.IntEnum):
    """What may come back to a unit after its forward, as far as the forward shows."""

    NOTHING = 0
    """No gradient can flow back into this forward."""
    READS = 1
    """No gradient can flow back, but a parameter was handed out to what runs next."""
    BACKWARD = 2
    """Every way back leads through an output that carries our hook."""
    HIDDEN = 3
    """Gradients may flow back by a way that we do not see."""


class ForwardEnter(NamedTuple):
    """``member`` (a module of the unit, by index) is about to run its forward."""

    unit: int
    member: int = 0
    task: int = NO_TASK


class ForwardExit(NamedTuple):
    """``member`` has run its forward, or was left by an exception (``failed``)."""

    unit: int
    member: int = 0
    task: int = NO_TASK
    follows: Follows = Follows.BACKWARD
    failed: bool = False


class Accumulates(enum.IntEnum):
    """Into which parameters a backward call brings gradients."""

    NOWHERE = 0
    """Into none at all: it is ``autograd.grad``."""
    ELSEWHERE = 1
    """Into none of this unit (or only by way of a nested task)."""
    HERE = 2
    """Into some of this unit."""


class BackwardEnter(NamedTuple):
    """The gradient of an output of ``use`` is about to flow into the unit.

    Autograd runs younger nodes first. So whatever began its forward after this use had ended its
    own, which is every use with a number above ``until``, has ended its backward in this task.

    ``until`` is the number of the last use that began before the output was made; ``keeps_graph``:
    the backward is differentiable itself (``create_graph``), and its graph reads the parameters.
    """

    unit: int
    use: int
    task: int
    until: int
    accumulates: Accumulates = Accumulates.HERE
    keeps_graph: bool = False


class BackwardLeave(NamedTuple):
    """The gradient of an input is about to flow out of a use: all above ``until`` have been left.

    Told where no ``BackwardEnter`` of another unit comes at the same moment.
    """

    task: int
    until: int


class GradsReady(NamedTuple):
    """The last parameter gradient that ``task`` itself computes for the unit has arrived."""

    unit: int
    task: int


class TaskEnd(NamedTuple):
    """``task`` ended; ``leftovers`` are units with gradients that no reduction took."""

    task: int
    leftovers: tuple[int, ...] = ()


class TaskDied(NamedTuple):
    """``task`` ended by an exception."""

    task: int
    leftovers: tuple[int, ...] = ()


class Finalize(NamedTuple):
    """``module.finalize_backward()``: the backwards of a step are over, as the user says.

    Without ``waits`` reductions that are under way end with ``AwaitReductions``.
    """

    waits: bool = True


class AwaitReductions(NamedTuple):
    """``handle.wait()`` of a ``Finalize`` that did not, or shards are about to be others."""


class UserUnshard(NamedTuple):
    """``module.unshard()``."""

    unit: int


class UserWait(NamedTuple):
    """``handle.wait()``."""

    unit: int


class UserReshard(NamedTuple):
    """``module.reshard()``."""

    unit: int


class WeightsChanged(NamedTuple):
    """Some sharded parameter may have a new value: unsharded copies made before are stale."""


class SetPolicy(NamedTuple):
    """Replace the policy of a unit."""

    unit: int
    policy: UnitPolicy


class SetMachinePolicy(NamedTuple):
    """Replace what holds for all units together."""

    policy: MachinePolicy


class Forget(NamedTuple):
    """Gradients of a unit that were not reduced to the end are dropped; between steps."""

    unit: int


class Reset(NamedTuple):
    """Give up the iteration: everything sharded, nothing pending."""


Trigger = (
    ForwardEnter
    | ForwardExit
    | BackwardEnter
    | BackwardLeave
    | GradsReady
    | TaskEnd
    | TaskDied
    | Finalize
    | AwaitReductions
    | UserUnshard
    | UserWait
    | UserReshard
    | WeightsChanged
    | SetPolicy
    | SetMachinePolicy
    | Forget
    | Reset
)


def kind_of(trigger: type[Trigger]) -> str:
    """Return the name of a kind of trigger in text form, and that of its handler."""
    name = trigger.__name__
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def text(trigger: Trigger) -> str:
    """Text form: the kind, then its fields.

    >>> text(GradsReady(unit=2, task=0))
    'grads_ready unit=2 task=0'
    """
    fields = (f"{name}={_value(value)}" for name, value in trigger._asdict().items())
    return " ".join((kind_of(type(trigger)), *fields))


def _value(value: object) -> str:
    if isinstance(value, enum.Enum):
        return value.name.lower()
    return "none" if value == NO_TASK else str(value)
