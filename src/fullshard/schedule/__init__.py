"""WHEN things move: triggers go in and actions come out, without tensors and without torch.

``Scheduler.on(trigger)`` answers with actions. ``triggers`` lists the events, ``actions`` the
possible effects, and ``state`` the facts remembered about each unit. Fed by real hooks, the machine
runs the training step; fed by a simulated walk of the model, the same machine plans the step.
"""

from __future__ import annotations

from fullshard.schedule.actions import Action, Op
from fullshard.schedule.record import Event, Observer, Recorder, Transcript
from fullshard.schedule.scheduler import Scheduler
from fullshard.schedule.state import (
    IN_USE,
    AfterForward,
    Ahead,
    Hold,
    MachinePolicy,
    Residency,
    UnitPolicy,
    UnitState,
)
