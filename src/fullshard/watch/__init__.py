"""The watch of each rank over the others: who left the common order of collectives, and why.

Nothing here runs in a step that goes well, but for a thread that reads a counter in the store.
"""

from __future__ import annotations

from fullshard.watch.last_words import confess, explain, settle
from fullshard.watch.roll import Roll, ended_key
from fullshard.watch.step import Step
from fullshard.watch.watcher import begin, watcher

__all__ = ["Roll", "Step", "begin", "confess", "ended_key", "explain", "settle", "watcher"]
