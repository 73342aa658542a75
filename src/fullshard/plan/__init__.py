"""Predict the memory, communication and time of a training step before a launch.

``plan`` runs a few steps dry (``dry_run``): the real engine on tensors without memory, whose bytes
and operations a ``Ledger`` books, in a world of ranks that are not there. ``Hardware`` describes
the machine that it is for.
"""

from __future__ import annotations

from fullshard.plan.calibrate import hardware_from, time_host
from fullshard.plan.hardware import CPU, PRESETS, Hardware, Host, Link, hardware_of
from fullshard.plan.picture import draw_plan
from fullshard.plan.plan import Measured, Plan, PlannedUnit, Traffic
from fullshard.plan.planning import plan
from fullshard.plan.text import in_bytes, in_seconds
