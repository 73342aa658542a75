"""Where checkpoints lie: folders of single machines, and their peers' copies."""

from __future__ import annotations

from fullshard.checkpoint.stores.machines import Machines, copy_files, lent

__all__ = [
    "Machines",
    "copy_files",
    "lent",
]
