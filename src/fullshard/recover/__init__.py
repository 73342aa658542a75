"""Resume a job on the ranks that survive a fault, in the same processes.

``resilient`` makes process groups and calls the user's training, once in each attempt. ``life`` has
the object that the training gets, and the state to start from. ``membership`` holds the vote on the
next attempt and its ranks. ``microbatches`` repeats a step in smaller parts when memory runs out.
"""

from __future__ import annotations

from fullshard.recover.life import Life, Restart
from fullshard.recover.microbatches import Microbatches
from fullshard.recover.resilient import resilient
