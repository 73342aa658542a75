"""The watch of each rank over the others: who left the common order of collectives, and why.

Nothing here runs in a step that goes well, but for a thread that reads a counter in the store.
"""

from __future__ import annotations

from fullshard.watch.last_words import begin, confess, settle, tear
from fullshard.watch.step import Step, Torn, steps
from fullshard.watch.watcher import watcher

__all__ = [
    "Step",
    "Torn",
    "begin",
    "confess",
    "settle",
    "steps",
    "tear",
    "watcher",
]
