"""Resumes a job on the ranks that survive a fault, in the same processes.

``resilient`` calls the user's training, once in each attempt. After an attempt, ``vote`` decides
on all ranks alike what comes next and which ranks survive; ``world`` leaves the old process groups
and makes new ones. ``microbatches`` repeats a step in smaller parts when memory runs out.
"""

from __future__ import annotations

from fullshard.recover.life import Life, Restart
from fullshard.recover.microbatches import Microbatches
from fullshard.recover.resilient import resilient

__all__ = ["Life", "Microbatches", "Restart", "resilient"]
