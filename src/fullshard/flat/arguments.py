"""Properties with the arguments of a wrapper, under the names of PyTorch's wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from fullshard.engine import WirePolicy
from fullshard.flat.options import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    as_cpu_offload,
)
from fullshard.frontend.buckets import device_of
from fullshard.frontend.meshes import DataMesh


@dataclass(frozen=True, eq=False)
class Given:
    """The arguments of one wrapper, with defaults for some arguments that are None."""

    mesh: DataMesh
    strategy: ShardingStrategy
    cpu_offload: CPUOffload
    mixed_precision: MixedPrecision
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    limit_all_gathers: bool
    wire: WirePolicy

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> Given:
        """Create from all arguments by name."""
        return cls(
            mesh=named["_mesh"],
            strategy=named["sharding_strategy"],
            cpu_offload=as_cpu_offload(named["cpu_offload"]),
            mixed_precision=named["mixed_precision"] or MixedPrecision(),
            backward_prefetch=named["backward_prefetch"],
            forward_prefetch=named["forward_prefetch"],
            limit_all_gathers=named["limit_all_gathers"],
            wire=named["wire"],
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # copies of a wrapper use the same mesh


class Arguments(nn.Module):
    """The read-only properties of ``FullyShardedDataParallel`` that tell its arguments."""

    _given: Given

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy; ``NO_SHARD`` if the mesh has one rank, except for hybrid strategies."""
        given = self._given
        is_alone = given.mesh.shard_dim is None and not given.strategy.is_hybrid
        return ShardingStrategy.NO_SHARD if is_alone else given.strategy

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that shard a copy together, or with ``NO_SHARD`` each hold a copy."""
        mesh = self._given.mesh.mesh
        return mesh.get_group(mesh.ndim - 1)

    @property
    def _inter_node_pg(self) -> dist.ProcessGroup | None:
        """With a hybrid strategy, the ranks that hold the same shard of different copies."""
        return self._given.mesh.mesh.get_group(0) if self._given.strategy.is_hybrid else None

    @property
    def rank(self) -> int:
        """This rank's index in ``process_group``."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """The number of ranks in ``process_group``."""
        return self.process_group.size()

    @property
    def compute_device(self) -> torch.device:
        """The device on which forward and backward run."""
        return device_of(self._given.mesh)

    @property
    def cpu_offload(self) -> CPUOffload:
        """The argument, or ``CPUOffload()`` if it was None."""
        return self._given.cpu_offload

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The argument, or ``MixedPrecision()`` if it was None."""
        return self._given.mixed_precision

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """The argument of the constructor."""
        return self._given.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        """The argument of the constructor."""
        return self._given.forward_prefetch

    @property
    def limit_all_gathers(self) -> bool:
        """The argument of the constructor."""
        return self._given.limit_all_gathers
