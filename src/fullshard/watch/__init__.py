"""The watch of each rank over the others: who left the common order of collectives, and why.

Nothing here runs in a step that goes well, but for a thread that reads a counter in the store.
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
