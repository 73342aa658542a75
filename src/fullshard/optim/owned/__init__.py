"""``OwnedOptimizer``: the rank that owns a matrix steps all of it."""

from __future__ import annotations

from fullshard.optim.owned.assign import placement_of
from fullshard.optim.owned.optimizer import OwnedOptimizer
