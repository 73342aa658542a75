"""Examine a job: its ranks, how they communicate and how fast, and what is wrong.

Start reading at ``visit.examine``: ranks tell their ``facts`` through the ``board``, form a process
group, and time its ``wires`` (``links``) and themselves (``speed``); ``findings`` are functions of
facts alone.
"""

from __future__ import annotations

from fullshard.doctor.facts import Facts, facts_here
from fullshard.doctor.findings import DoctorFinding, Level, half_launched
from fullshard.doctor.report import Dim, GroupTimings, Report
from fullshard.doctor.speed import Speed
from fullshard.doctor.visit import examine, measure
from fullshard.doctor.wires import mesh_shape, reason
