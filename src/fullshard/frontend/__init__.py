"""torch.nn faces of the engine.

``ownership`` says which parameters a call owns and where they stand, ``checks`` what it refuses,
``build`` makes the unit, ``hooks`` drive the engine, ``module`` is what users call afterwards.
"""

from __future__ import annotations

from fullshard.frontend.fully_shard import fully_shard
from fullshard.frontend.module import FSDPModule, UnshardHandle

__all__ = ["FSDPModule", "UnshardHandle", "fully_shard"]
