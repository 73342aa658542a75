"""Small programs that between them use every join, wait, mark and event of the engine."""

from __future__ import annotations

from tests.lanes.programs import around, states, streams, training  # noqa: F401
from tests.lanes.programs.base import PROGRAMS, Program

__all__ = ["PROGRAMS", "Program"]
