"""Predict the memory, communication and time of a training step before a launch.

``plan`` runs a few steps dry (``dry_run``): the real engine runs on tensors without memory, in a
simulated world of ranks. A ``PlanLedger`` books bytes and operations. ``Hardware`` describes the
machine to plan for.
"""

from __future__ import annotations

from fullshard.plan.calibrate import hardware_from, time_host
from fullshard.plan.hardware import CPU, PRESETS, Hardware, Host, Link, hardware_of
from fullshard.plan.picture import draw_plan
from fullshard.plan.plan import Measured, Plan, PlannedUnit, Traffic
from fullshard.plan.planning import plan
from fullshard.plan.text import in_bytes, in_seconds
