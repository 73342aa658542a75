"""Examine a job before it trains: its ranks, their communication, and common mistakes.

Start reading at ``visit.examine``. Ranks send their ``facts`` through an ``exchange``, then form
a process group and time its collectives (``wires``, ``links``) and their own ``speed``. The checks
in ``findings`` need facts alone; ``report`` adds the checks of times.
"""

from __future__ import annotations

from fullshard.doctor.facts import Facts, facts_here
from fullshard.doctor.findings import DoctorFinding, Level, half_launched
from fullshard.doctor.report import Dim, GroupTimings, Report
from fullshard.doctor.speed import Speed
from fullshard.doctor.visit import examine, measure
from fullshard.doctor.wires import mesh_shape, reason
