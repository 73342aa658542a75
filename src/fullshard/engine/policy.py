"""The policies that users choose for a call of ``fully_shard``; frozen values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.errors import ConfigError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of computation and communication; sharded parameters and ``.grad`` keep theirs.

    The fields are those of ``torch.distributed.fsdp.MixedPrecisionPolicy``, whose instances are
    accepted too.
    """

    param_dtype: torch.dtype | None = None
    """The dtype of the all-gather and of the unsharded parameters (only floating-point parameters
    are cast); None: the dtype of the sharded parameters."""
    reduce_dtype: torch.dtype | None = None
    """The dtype of the reduction of gradients, and of gradients accumulated without synchronization
    (at least). None: follow the installed PyTorch: since 2.15, ``grad_dtype`` of the parameters,
    which is the parameters' own dtype unless set; before, the dtype of the unsharded parameters."""
    output_dtype: torch.dtype | None = None
    """The dtype to which floating-point outputs of the module's forward are cast; None: no cast."""
    cast_forward_inputs: bool = True
    """True if floating-point inputs of the module's forward are cast to ``param_dtype``."""
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )
    """A function called once with each parameter when it is sharded; all ranks must return the
    same: the parameter's own dtype, to keep it, or None or ``param_dtype``, to use the latter."""

    def for_param(self, name: str, param: nn.Parameter) -> MixedPrecisionPolicy:
        """Return the policy for one parameter, with ``param_dtype_override_fn`` resolved.

        Raises:
            ConfigError: the result is neither None, ``param_dtype`` nor the parameter's own dtype.
        """
        if self.param_dtype_override_fn is None:
            return self
        answer = self.param_dtype_override_fn(param)
        if answer not in (None, self.param_dtype, param.dtype):
            raise ConfigError(
                f"MixedPrecisionPolicy(param_dtype_override_fn=...): got {answer!r} for parameter "
                f"{name}; expected None or param_dtype ({self.param_dtype}), for the default, or "
                f"the parameter's own dtype ({param.dtype})"
            )
        chosen = self.param_dtype if answer is None else answer
        return replace(self, param_dtype=chosen, param_dtype_override_fn=None)


@dataclass(frozen=True)
class OffloadPolicy:
    """The default policy: everything stays on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """The policy that keeps shards, gradients and so the optimizer on the CPU, and gathers there.

    Shards are cast before they cross the bus, and read at once, so that they may be written to
    while the copy is in flight. Build the optimizer on the sharded parameters, as always.
    """

    pin_memory: bool = True
    """True if copies go through pinned memory, so that they overlap with computation; if False,
    each copy blocks the host."""


@dataclass(frozen=True)
class ReducePolicy:
    """The treatment of a unit's gradients, as set after ``fully_shard``; replaced as a whole."""

    divide_by: float | None = None
    """The divisor of the sum over all ranks; None: the number of ranks."""
    fill_absent: bool = False
    """True if parameters that no rank has a gradient for get zeros instead of None."""
    inspect: Callable[[Sequence[str], Sequence[Tensor | None]], object] | None = None
    """A function called with names and this rank's gradients, whole, before they are reduced."""
    hook: Callable[[Tensor], object] | None = None
    """A function called with all reduced gradients of a bucket, 1-D, to change in place."""
    hook_stream: Any = None
    """The stream on which the hook runs; None: the stream of the reduction."""
