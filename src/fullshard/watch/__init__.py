"""Find the rank that left the common order of collectives, report why, and end the step.

In a step without faults, only a thread runs here, which reads a counter in the store.
"""

from __future__ import annotations

from fullshard.watch.reporting import await_verdict, begin, report_failure, report_half_step
from fullshard.watch.step import HalfStep, Step, steps
from fullshard.watch.watcher import watcher
