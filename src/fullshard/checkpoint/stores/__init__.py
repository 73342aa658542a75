"""Where checkpoints lie: folders of all ranks or of single machines, and object stores."""

from __future__ import annotations

from fullshard.checkpoint.stores.machines import Machines, lent
from fullshard.checkpoint.stores.targets import (
    SaveTarget,
    exists,
    remove,
    remove_unfinished,
    target_at,
)
