"""Decide when units are gathered, freed and reduced: triggers in, actions out; no torch.

``Scheduler.on(trigger)`` answers with actions. ``triggers`` lists the events, ``actions`` the
possible effects, and ``state`` the facts remembered about each unit. Fed by real hooks, the machine
runs the training step; fed by a simulated walk of the model, the same machine plans the step.
"""

from __future__ import annotations

from fullshard.schedule.actions import Action, Op
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
from fullshard.schedule.triggers import Event, Observer, Recorder, Transcript
