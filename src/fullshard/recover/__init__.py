"""Resumes a job on the ranks that survive a fault, in the same processes.

``resilient`` calls the user's training, once in each attempt, and makes process groups for it.
``life`` is what the training sees of an attempt, with the state it takes up. In ``membership`` the
ranks decide alike what comes next and who takes part. ``microbatches`` repeats a step in smaller
parts when memory runs out.
"""

from __future__ import annotations

from fullshard.recover.life import Life, Restart
from fullshard.recover.microbatches import Microbatches
from fullshard.recover.resilient import resilient

__all__ = ["Life", "Microbatches", "Restart", "resilient"]
