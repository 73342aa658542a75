"""The options chosen for a whole model: a search finds them, ``shard_blocks`` applies them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from fullshard.comm import default_mesh
from fullshard.engine import OffloadPolicy, WirePolicy
from fullshard.errors import ArgumentTypeError, ConfigError
from fullshard.layout import LayoutStrategy, PerParameter

CHOSEN = ("layout", "reshard_after_forward", "offload_policy", "wire")
"""Options of ``fully_shard`` that a choice has."""


@dataclass(frozen=True)
class Choice:
    """The options with which a model is sharded and run, except its precision."""

    replicas: int = 1
    """Copies of the shards (HSDP)."""
    layout: LayoutStrategy = field(default_factory=PerParameter)
    reshard_after_forward: bool | int | None = None
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    wire: WirePolicy = field(default_factory=WirePolicy)
    """Copied from the arguments; the search never picks a lossy codec."""
    blocks_per_unit: int = 1
    """Neighboring blocks that form one unit; the rest at the end of a list forms a smaller unit."""
    recomputed: int = 0
    """Blocks, from the first on, whose activations are computed again in backward."""
    prefetch_nbytes: int | None = None
    """As of ``set_prefetch_budget``."""
    reduction_nbytes: int | None = None
    """As of ``set_reduction_budget``."""

    @classmethod
    def of(cls, given: Any) -> Choice:
        """Return the choice that is given, or the ``choice`` of a plan.

        Raises:
            ArgumentTypeError: ``given`` is neither.
        """
        found = getattr(given, "choice", given)
        if not isinstance(found, cls):
            raise ArgumentTypeError(
                f"shard_blocks(plan=...): got {type(given).__name__}, expected a Plan of "
                "fullshard.plan(..., budget_nbytes=...), which has chosen"
            )
        return found

    def __str__(self) -> str:
        return ", ".join(self._words()) or "as by default"

    def _words(self) -> Iterator[str]:
        if self.replicas > 1:
            yield f"{self.replicas} replicas"
        if self.layout != PerParameter():
            yield f"layout {self.layout!r}"
        if self.reshard_after_forward is False:
            yield "kept after forward"
        elif self.reshard_after_forward is not None:
            yield f"reshard_after_forward={self.reshard_after_forward}"
        if self.offload_policy != OffloadPolicy():
            yield "offloaded to the host"
        if self.wire != WirePolicy():
            yield f"wire {self.wire}"
        if self.blocks_per_unit > 1:
            yield f"{self.blocks_per_unit} blocks a unit"
        if self.recomputed:
            yield f"{self.recomputed} blocks recomputed"
        if self.prefetch_nbytes is not None:
            yield f"{self.prefetch_nbytes / 1e6:.3g} MB gathered ahead"
        if self.reduction_nbytes is not None:
            yield f"{self.reduction_nbytes / 1e6:.3g} MB in reductions"

    def checked_mesh(self, mesh: DeviceMesh | None) -> DeviceMesh:
        """Return the mesh to shard over, or check the user's.

        Raises:
            ConfigError: there are not as many replicas as chosen.
        """
        if mesh is None:
            mesh = default_mesh()
            if self.replicas == 1:
                return mesh
            shards, left = divmod(mesh.size(), self.replicas)
            if left:
                raise ConfigError(
                    f"shard_blocks(plan=...): the plan has {self.replicas} replicas, which do not "
                    f"divide {mesh.size()} ranks; plan for as many as there are"
                )
            return init_device_mesh(
                mesh.device_type,
                (self.replicas, shards),
                mesh_dim_names=("replicate", "shard"),
            )
        replicas = mesh.size(0) if mesh.ndim == 2 else 1
        if replicas != self.replicas:
            raise ConfigError(
                f"shard_blocks(plan=...): the plan has {self.replicas} replicas, the mesh "
                f"{replicas}; leave mesh= out, or plan for this mesh"
            )
        return mesh


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Make each of ``blocks`` recompute its activations in backward, instead of keeping them."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
