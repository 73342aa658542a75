"""A job goes on without the ranks that it lost, in the processes that are left.

``resilient`` calls the user's training in one life of the job after the other. ``vote`` is how all
ranks find, at the end of each, what comes next and who is left; ``world`` leaves the old process
groups and makes new ones. ``microbatches`` goes on with a step that memory did not suffice for.
"""

from __future__ import annotations

from fullshard.recover.life import Life, Restart
from fullshard.recover.microbatches import Microbatches
from fullshard.recover.resilient import resilient

__all__ = ["Life", "Microbatches", "Restart", "resilient"]
