"""What a wrapper was made with, under the names that PyTorch's wrapper has for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from fullshard.flat.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fullshard.frontend.buckets import device_of
from fullshard.frontend.meshes import DataMesh


@dataclass(frozen=True, eq=False)
class Given:
    """Arguments of one wrapper, with what is usual for those that are None."""

    mesh: DataMesh
    strategy: ShardingStrategy
    cpu_offload: CPUOffload
    mixed_precision: MixedPrecision
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    limit_all_gathers: bool

    @classmethod
    def of(cls, mesh: DataMesh, named: Mapping[str, Any]) -> Given:
        """From all arguments by name."""
        return cls(
            mesh=mesh,
            strategy=named["sharding_strategy"],
            cpu_offload=named["cpu_offload"] or CPUOffload(),
            mixed_precision=named["mixed_precision"] or MixedPrecision(),
            backward_prefetch=named["backward_prefetch"],
            forward_prefetch=named["forward_prefetch"],
            limit_all_gathers=named["limit_all_gathers"],
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # copies of a wrapper are on the same mesh


class Arguments(nn.Module):
    """What ``FullyShardedDataParallel`` tells of its arguments; they cannot be changed later."""

    _given: Given

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy; ``NO_SHARD`` where one rank alone has nobody to share with."""
        given = self._given
        is_alone = given.mesh.shard_dim is None and not given.strategy.is_hybrid
        return ShardingStrategy.NO_SHARD if is_alone else given.strategy

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that share a copy; where nothing is sharded, those that hold one."""
        mesh = self._given.mesh.mesh
        return mesh.get_group(mesh.ndim - 1)

    @property
    def _inter_node_pg(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of different copies, with a hybrid strategy."""
        return self._given.mesh.mesh.get_group(0) if self._given.strategy.is_hybrid else None

    @property
    def rank(self) -> int:
        """This rank's number in ``process_group``."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """How many ranks are in ``process_group``."""
        return self.process_group.size()

    @property
    def compute_device(self) -> torch.device:
        """Where forward and backward run."""
        return device_of(self._given.mesh)

    @property
    def cpu_offload(self) -> CPUOffload:
        """As it was given, or what is usual."""
        return self._given.cpu_offload

    @property
    def mixed_precision(self) -> MixedPrecision:
        """As it was given, or what is usual."""
        return self._given.mixed_precision

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """As it was given."""
        return self._given.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        """As it was given."""
        return self._given.forward_prefetch

    @property
    def limit_all_gathers(self) -> bool:
        """As it was given."""
        return self._given.limit_all_gathers
