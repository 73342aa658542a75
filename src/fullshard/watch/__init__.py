"""The watch: finds which rank left the common order of collectives, and why, and ends the step.

In a step without faults, only a thread runs here, which reads a counter in the store.
"""

from __future__ import annotations

from fullshard.watch.reporting import begin, report_failure, report_half_step, settle
from fullshard.watch.roll import DEAD, Roll, ended_key
from fullshard.watch.step import HalfStep, Step, steps
from fullshard.watch.watcher import watcher

__all__ = [
    "DEAD",
    "HalfStep",
    "Roll",
    "Step",
    "begin",
    "ended_key",
    "report_failure",
    "report_half_step",
    "settle",
    "steps",
    "watcher",
]
