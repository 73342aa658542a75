"""What ``FullyShardedDataParallel`` is asked for: its enums and configurations, as values.

Names, members, fields and defaults are those of ``torch.distributed.fsdp``, whose own are accepted
wherever these are: enums by the names of their members, configurations by their fields.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fullshard.errors import ArgumentTypeError
from fullshard.schedule import Ahead

Member = TypeVar("Member", bound=enum.Enum)


class ShardingStrategy(enum.Enum):
    """What is sharded, and when parameters are whole: a mesh and when to reshard.

    ======================  ==========================  ========================
    strategy                mesh                        after forward
    ======================  ==========================  ========================
    FULL_SHARD              all ranks share a copy      resharded, but the root
    SHARD_GRAD_OP           all ranks share a copy      kept until backward ends
    NO_SHARD                every rank has a copy
    HYBRID_SHARD            copies, shared by groups    resharded, but the root
    _HYBRID_SHARD_ZERO2     copies, shared by groups    kept until backward ends
    ======================  ==========================  ========================
    """

    FULL_SHARD = enum.auto()
    SHARD_GRAD_OP = enum.auto()
    NO_SHARD = enum.auto()
    HYBRID_SHARD = enum.auto()
    _HYBRID_SHARD_ZERO2 = enum.auto()

    @property
    def is_hybrid(self) -> bool:
        """Whether there are copies that are shared by groups."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

    @property
    def keeps(self) -> bool:
        """Whether parameters are kept whole between forward and backward."""
        return self in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


class BackwardPrefetch(enum.Enum):
    """When backward gathers the next unit: before it computes gradients, or after."""

    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()

    @property
    def ahead(self) -> Ahead:
        """What that is to the engine."""
        return Ahead.AT_START if self is BackwardPrefetch.BACKWARD_PRE else Ahead.AT_END


class StateDictType(enum.Enum):
    """What a state dict holds."""

    FULL_STATE_DICT = enum.auto()
    """Whole plain tensors."""
    LOCAL_STATE_DICT = enum.auto()
    """Historical, refused: this rank's flat parameter."""
    SHARDED_STATE_DICT = enum.auto()
    """DTensors, cut on dim 0."""


class OptimStateKeyType(enum.Enum):
    """What optimizer states are keyed by."""

    PARAM_NAME = enum.auto()
    PARAM_ID = enum.auto()


@dataclass
class MixedPrecision:
    """Dtypes of computation and communication; shards, optimizer and checkpoints keep theirs."""

    param_dtype: torch.dtype | None = None
    """Of the all-gather and of computation; None: the parameters' own."""
    reduce_dtype: torch.dtype | None = None
    """Of the reduction of gradients; None: ``param_dtype``."""
    buffer_dtype: torch.dtype | None = None
    """Floating-point buffers are cast to it at the first forward and stay so; full and sharded
    state dicts hold them in their own dtype."""
    keep_low_precision_grads: bool = False
    """Whether reduced gradients stay in the dtype of reduction, for an optimizer that takes
    such."""
    cast_forward_inputs: bool = False
    """Whether floating-point inputs of this unit's forward are cast to ``param_dtype``."""
    cast_root_forward_inputs: bool = True
    """The same where this unit is the root of the forward."""
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)
    full_precision_in_eval: bool = False
    """Whether modules in ``eval()`` compute in the parameters' own dtype, with buffers in theirs;
    decided anew whenever the outermost wrapper, which must have it, is called. PyTorch has only
    the environment variable ``FSDP_USE_FULL_PREC_IN_EVAL=1``, which means it here as well."""


@dataclass
class CPUOffload:
    """Whether shards, gradients and optimizer are on the CPU."""

    offload_params: bool = False


@dataclass
class StateDictConfig:
    """How a state dict is made."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """How a full one is made."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Historical."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """How a sharded one is made; its values are DTensors in any case."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """How an optimizer's state dict is made."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """How a full one is made."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Historical."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """How a sharded one is made; its values are DTensors in any case."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """What the state dicts of a module are like."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


def member_of(cls: type[Member], given: Any, argument: str) -> Member:
    """``given`` as a member of ``cls``; PyTorch's is one by its name.

    Raises:
        ArgumentTypeError: it is none.
    """
    if isinstance(given, cls):
        return given
    if isinstance(given, enum.Enum) and type(given).__name__ == cls.__name__:
        return cls[given.name]
    raise ArgumentTypeError(
        f"FullyShardedDataParallel({argument}={given!r}): expected a {cls.__name__}"
    )
