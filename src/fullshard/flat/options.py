"""The enums and configurations that ``FullyShardedDataParallel`` takes as arguments.

Names, members, fields and defaults are those of ``torch.distributed.fsdp``. PyTorch's own enums
and configurations are accepted too: enums by member name, configurations by their fields.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fullshard._torch import nn as _nn
from fullshard.comm import played_by
from fullshard.engine import Offload, WirePolicy
from fullshard.errors import ArgumentTypeError
from fullshard.frontend.meshes import DataMesh
from fullshard.schedule import Ahead

Member = TypeVar("Member", bound=enum.Enum)


class ShardingStrategy(enum.Enum):
    """The ranks that shard a copy of the parameters, and when to reshard after forward.

    ======================  ==========================  ========================
    strategy                copies of the parameters    after forward
    ======================  ==========================  ========================
    FULL_SHARD              one, sharded by all ranks   resharded, except root
    SHARD_GRAD_OP           one, sharded by all ranks   kept until backward ends
    NO_SHARD                one on every rank
    HYBRID_SHARD            one per group of ranks      resharded, except root
    _HYBRID_SHARD_ZERO2     one per group of ranks      kept until backward ends
    ======================  ==========================  ========================
    """

    FULL_SHARD = enum.auto()
    SHARD_GRAD_OP = enum.auto()
    NO_SHARD = enum.auto()
    HYBRID_SHARD = enum.auto()
    _HYBRID_SHARD_ZERO2 = enum.auto()

    @property
    def is_hybrid(self) -> bool:
        """Return whether there are several copies, each sharded by a group of ranks."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

    @property
    def keeps(self) -> bool:
        """Return whether parameters stay unsharded between forward and backward."""
        return self in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


class BackwardPrefetch(enum.Enum):
    """The time at which backward gathers the next unit: before or after it computes gradients."""

    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()

    @property
    def ahead(self) -> Ahead:
        """The engine's value for this choice."""
        return Ahead.AT_START if self is BackwardPrefetch.BACKWARD_PRE else Ahead.AT_END


class StateDictType(enum.Enum):
    """The kind of values in a state dict."""

    FULL_STATE_DICT = enum.auto()
    """Full plain tensors."""
    LOCAL_STATE_DICT = enum.auto()
    """This rank's flat parameter. Obsolete and refused."""
    SHARDED_STATE_DICT = enum.auto()
    """DTensors, which data parallelism shards on dim 0."""


class OptimStateKeyType(enum.Enum):
    """The keys of optimizer state: parameter names or indices."""

    PARAM_NAME = enum.auto()
    PARAM_ID = enum.auto()


@dataclass
class MixedPrecision:
    """Dtypes of computation and communication, not of shards, optimizer state and checkpoints."""

    param_dtype: torch.dtype | None = None
    """Dtype of the all-gather and of computation; None: the parameters' dtype."""
    reduce_dtype: torch.dtype | None = None
    """Dtype of the reduction of gradients; None: ``param_dtype``."""
    buffer_dtype: torch.dtype | None = None
    """Dtype of floating-point buffers from the first forward on; None: their own dtype. State
    dicts, full and sharded, hold buffers in their own dtype."""
    keep_low_precision_grads: bool = False
    """Keep reduced gradients in the dtype of reduction, for an optimizer that accepts it."""
    cast_forward_inputs: bool = False
    """Cast floating-point inputs of forward to ``param_dtype``, if this unit has parameters."""
    cast_root_forward_inputs: bool = True
    """Cast floating-point inputs of forward to ``param_dtype`` if this unit is the root, which
    obeys ``cast_forward_inputs`` as well."""
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_nn.BatchNorm,)
    full_precision_in_eval: bool = False
    """Use the own dtypes of parameters and buffers in modules that are in ``eval()``. Each call of
    the outermost wrapper checks the modes; that wrapper must have this option too. The environment
    variable ``FSDP_USE_FULL_PREC_IN_EVAL=1``, PyTorch's only way, also turns this option on."""


@dataclass
class CPUOffload:
    """The choice to keep shards, gradients and optimizer state on the CPU."""

    offload_params: bool = False


@dataclass
class StateDictConfig:
    """Options for making a state dict of a model."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Options for making a full state dict of a model."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Options of ``LOCAL_STATE_DICT``, which is obsolete and refused."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Options for making a sharded state dict of a model, whose values are always DTensors."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Options for making a state dict of an optimizer."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Options for making a full state dict of an optimizer."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options of ``LOCAL_STATE_DICT``, which is obsolete and refused."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Options for making a sharded state dict of an optimizer, whose values are always DTensors."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """The kind of a module's state dicts, and the options for making them."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


def as_cpu_offload(given: Any) -> CPUOffload:
    """Return the user's ``cpu_offload``, or the default if that is None.

    Raises:
        ArgumentTypeError: if it is not a ``CPUOffload``.
    """
    if given is not None and not isinstance(getattr(given, "offload_params", None), bool):
        raise ArgumentTypeError(
            f"FullyShardedDataParallel(cpu_offload={given!r}): expected a CPUOffload"
        )
    return given or CPUOffload()


def as_offload(given: CPUOffload, device: torch.device) -> Offload | None:
    """Return the engine's form of the user's choice; None without offload, as always on the CPU."""
    on_host = given.offload_params and played_by(device.type) != "cpu"
    return Offload(pinned=True) if on_host else None


def member_of(cls: type[Member], given: Any, argument: str) -> Member:
    """Return ``given`` as a member of ``cls``; members of PyTorch's enum are matched by name.

    Raises:
        ArgumentTypeError: if ``given`` is a member of neither enum.
    """
    if isinstance(given, cls):
        return given
    if isinstance(given, enum.Enum) and type(given).__name__ == cls.__name__:
        return cls[given.name]
    raise ArgumentTypeError(
        f"FullyShardedDataParallel({argument}={given!r}): expected a {cls.__name__}"
    )


@dataclass(frozen=True, eq=False)
class Given:
    """The arguments of one wrapper that its inner wrappers get too, by their names there."""

    sharding_strategy: ShardingStrategy
    cpu_offload: CPUOffload
    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision
    device_id: Any
    sync_module_states: bool
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    wire: WirePolicy
    _mesh: DataMesh

    @property
    def mesh(self) -> DataMesh:
        """The mesh, with the dims that shard and replicate."""
        return self._mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # copies of a wrapper use the same mesh


def _argument(name: str, doc: str = "The argument of the constructor.") -> Any:
    return property(attrgetter(f"_given.{name}"), doc=doc)


class Arguments(nn.Module):
    """The read-only properties of ``FullyShardedDataParallel`` that tell its arguments."""

    _given: Given

    cpu_offload = _argument("cpu_offload", "The argument, or ``CPUOffload()`` if it was None.")
    mixed_precision = _argument(
        "mixed_precision", "The argument, or ``MixedPrecision()`` if it was None."
    )
    backward_prefetch = _argument("backward_prefetch")
    forward_prefetch = _argument("forward_prefetch")
    limit_all_gathers = _argument("limit_all_gathers")

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy; ``NO_SHARD`` if the mesh has one rank, except for hybrid strategies."""
        given = self._given
        is_alone = given.mesh.shard_dim is None and not given.sharding_strategy.is_hybrid
        return ShardingStrategy.NO_SHARD if is_alone else given.sharding_strategy

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that shard a copy together, or with ``NO_SHARD`` each hold a copy."""
        mesh = self._given.mesh.mesh
        return mesh.get_group(mesh.ndim - 1)

    @property
    def _inter_node_pg(self) -> dist.ProcessGroup | None:
        """With a hybrid strategy, the ranks that hold the same shard of different copies."""
        return (
            self._given.mesh.mesh.get_group(0) if self._given.sharding_strategy.is_hybrid else None
        )

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
        return self._given.mesh.device
