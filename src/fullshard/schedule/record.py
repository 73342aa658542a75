"""Events of the machine, and who receives them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fullshard.schedule.actions import Action
from fullshard.schedule.triggers import Trigger, text


class Event(NamedTuple):
    """A trigger and the actions that followed from it."""

    trigger: Trigger
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return f"{text(self.trigger)} -> {', '.join(map(str, self.actions)) or '-'}"


class Recorder(Protocol):
    """A receiver of each event, after the machine has decided and before the engine acts."""

    def record(self, event: Event) -> None:
        """Take note of ``event``."""


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
