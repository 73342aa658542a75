"""WHEN things move: triggers in, actions out, no tensor and no torch.

``Scheduler.on(trigger)`` answers with actions. What happens is in ``triggers``, what can be done in
``actions``, what is remembered of a unit in ``state``. The same machine fed by real hooks runs the
training step, and fed by a simulated walk of the model plans it.
"""

from __future__ import annotations

from fullshard.schedule.actions import Action, Op
from fullshard.schedule.record import Event, Recorder, Transcript
from fullshard.schedule.scheduler import Scheduler
from fullshard.schedule.state import (
    AfterForward,
    Ahead,
    Hold,
    MachinePolicy,
    Residency,
    UnitPolicy,
    UnitState,
)

__all__ = [
    "Action",
    "AfterForward",
    "Ahead",
    "Event",
    "Hold",
    "MachinePolicy",
    "Op",
    "Recorder",
    "Residency",
    "Scheduler",
    "Transcript",
    "UnitPolicy",
    "UnitState",
]
