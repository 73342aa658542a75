"""The triggers that the scheduler answers, one immutable value per kind, and their recorders.

A ``task`` is one backward call of autograd, named by its number; ``NO_TASK`` means "outside of any
backward". A ``use`` is the index of one forward call of a unit; the machine counts the uses.
"""

from __future__ import annotations

import enum
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fullshard.schedule.actions import Action
from fullshard.schedule.state import MachinePolicy, UnitPolicy

NO_TASK = -1
"""Autograd's own number for "no backward is running"."""


class Follows(enum.IntEnum):
    """The gradients that may flow back into a unit after its forward, as far as we can see."""

    NOTHING = 0
    """No gradient can flow back into this forward."""
    READS = 1
    """No gradient can flow back, but a parameter was handed out to later computation."""
    BACKWARD = 2
    """Every gradient path back leads through an output that carries our hook."""
    HIDDEN = 3
    """Gradients may flow back along a path that we do not see."""


class ForwardEnter(NamedTuple):
    """The trigger of a module, the unit's ``member`` by index, about to run its forward."""

    unit: int
    member: int = 0
    task: int = NO_TASK


class ForwardExit(NamedTuple):
    """The trigger of a ``member`` that ran its forward, or left by an exception (``failed``)."""

    unit: int
    member: int = 0
    task: int = NO_TASK
    follows: Follows = Follows.BACKWARD
    failed: bool = False


class Accumulates(enum.IntEnum):
    """The parameters into which a backward call accumulates gradients."""

    NOWHERE = 0
    """No parameters at all: the call is ``autograd.grad``."""
    ELSEWHERE = 1
    """No parameters of this unit (or only through a nested task)."""
    HERE = 2
    """Some parameters of this unit."""


class BackwardEnter(NamedTuple):
    """The trigger of a gradient about to flow into the unit through an output of ``use``.

    Autograd runs younger nodes first. So every use that began its forward after this use had ended
    its forward, which is every use with an index above ``until``, has ended its backward in this
    task. ``until`` is the index of the last use that began before the output was made.
    ``keeps_graph`` is True if the backward is differentiable itself (``create_graph``), so that its
    graph reads the parameters.
    """

    unit: int
    use: int
    task: int
    until: int
    accumulates: Accumulates = Accumulates.HERE
    keeps_graph: bool = False


class BackwardLeave(NamedTuple):
    """The trigger of a gradient about to leave a use: all uses above ``until`` have been left.

    Raised only where no ``BackwardEnter`` of another unit comes at the same moment.
    """

    task: int
    until: int


class GradsReady(NamedTuple):
    """The trigger of the last parameter gradient that ``task`` itself computes for the unit."""

    unit: int
    task: int


class TaskEnd(NamedTuple):
    """The end of ``task``; ``leftovers`` are units with gradients that no reduction took."""

    task: int
    leftovers: tuple[int, ...] = ()


class TaskDied(NamedTuple):
    """The end of ``task`` by an exception; ``leftovers`` as in ``TaskEnd``."""

    task: int
    leftovers: tuple[int, ...] = ()


class Finalize(NamedTuple):
    """A call of ``module.finalize_backward()``: the user says that a step's backwards are over.

    If ``waits`` is False, the reductions in flight end with ``AwaitReductions``.
    """

    waits: bool = True


class AwaitReductions(NamedTuple):
    """The ``handle.wait()`` of a ``Finalize`` that did not wait, or shards that will change."""


class UserUnshard(NamedTuple):
    """A call of ``module.unshard()``."""

    unit: int


class UserWait(NamedTuple):
    """A call of ``handle.wait()`` after ``module.unshard()``."""

    unit: int


class UserReshard(NamedTuple):
    """A call of ``module.reshard()``, or a reshard by the engine itself."""

    unit: int


class WeightsChanged(NamedTuple):
    """A possible change of sharded parameters: unsharded copies made before are stale."""


class SetPolicy(NamedTuple):
    """A new policy for a unit."""

    unit: int
    policy: UnitPolicy


class SetMachinePolicy(NamedTuple):
    """A new policy for all units together."""

    policy: MachinePolicy


class Forget(NamedTuple):
    """An order, given between steps, to drop gradients of a unit that were not fully reduced."""

    unit: int


class Reset(NamedTuple):
    """An order to give up the iteration: all units sharded, no gradients pending."""


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
    """Return the name of a kind of trigger in text form; its handler has the same name."""
    name = trigger.__name__
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def text(trigger: Trigger) -> str:
    """Return the text form of ``trigger``: its kind, then its fields.

    >>> text(GradsReady(unit=2, task=0))
    'grads_ready unit=2 task=0'
    """
    fields = (f"{name}={_value(value)}" for name, value in trigger._asdict().items())
    return " ".join((kind_of(type(trigger)), *fields))


def _value(value: object) -> str:
    if isinstance(value, enum.Enum):
        return value.name.lower()
    return "none" if value == NO_TASK else str(value)


class Event(NamedTuple):
    """A trigger and the actions that followed from it."""

    trigger: Trigger
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return f"{text(self.trigger)} -> {', '.join(map(str, self.actions)) or '-'}"


class Recorder(Protocol):
    """A receiver of each event, after the machine has decided and before the engine acts."""

    def record(self, event: Event) -> None:
        """Record ``event``."""


class Observer(Protocol):
    """A witness of actions, each while the engine carries it out."""

    def acting(self, action: Action) -> AbstractContextManager[object]:
        """Return a context in which ``action`` is carried out."""


@dataclass
class Transcript:
    """A recorder that keeps every event; ``str()`` is the text that golden files hold."""

    events: list[Event] = field(default_factory=list)

    def record(self, event: Event) -> None:
        """Append ``event``."""
        self.events.append(event)

    def actions(self) -> list[Action]:
        """Return all actions, in order."""
        return [action for event in self.events for action in event.actions]

    def __str__(self) -> str:
        return "".join(f"{event}\n" for event in self.events)
