"""``ShardedOptimizer``: parameters that are neighbours in memory step as one tensor."""

from __future__ import annotations

from fullshard.optim.flat.optimizer import ShardedOptimizer
from fullshard.optim.flat.plan import align
from fullshard.optim.flat.scalars import is_cut, is_cut_tensor, one_for_many
