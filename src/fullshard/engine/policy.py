"""What users choose for a call of ``fully_shard``; frozen values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.errors import ConfigError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of computation and communication; sharded parameters and gradients keep theirs.

    The fields are those of ``torch.distributed.fsdp.MixedPrecisionPolicy``, whose instances are
    accepted too.
    """

    param_dtype: torch.dtype | None = None
    """Of the all-gather and of the unsharded parameters (floating-point ones only); None: their
    own."""
    reduce_dtype: torch.dtype | None = None
    """Of the reduction of gradients, and of what adds up without synchronisation. None: as in the
    PyTorch that is installed: since 2.15 what ``grad_dtype`` of the parameters says, which is their
    own dtype unless it was set; before, the dtype of the unsharded parameters."""
    output_dtype: torch.dtype | None = None
    """Floating-point outputs of the module's forward are cast to it; None: no cast."""
    cast_forward_inputs: bool = True
    """Whether floating-point inputs of the module's forward are cast to ``param_dtype``."""
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )
    """Called once with each parameter when it is sharded, with the same answer on all ranks: its
    own dtype, in which it stays; or None or ``param_dtype``, which holds for it then."""

    def for_param(self, name: str, param: nn.Parameter) -> MixedPrecisionPolicy:
        """The policy for one parameter, with nothing to ask any more.

        Raises:
            ConfigError: the answer is a dtype that is neither of the two, or none at all.
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
    """Keep everything on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards and gradients on the CPU, and so the optimizer; gather from there.

    Shards are cast before they cross the bus, and read at once, so that they may be written to
    while the copy is on its way. Build the optimizer on the sharded parameters, as always.
    """

    pin_memory: bool = True
    """Whether copies go through pinned memory, which lets them overlap with computation; if not,
    each one blocks the host."""


@dataclass(frozen=True)
class ReducePolicy:
    """What becomes of the gradients of a unit, as set after the call; replaced as a whole."""

    divide_by: float | None = None
    """The sum over all ranks is divided by this; None: by their number."""
    fill_absent: bool = False
    """Whether parameters that no rank has a gradient for get zeros instead of None."""
    hook: Callable[[Tensor], object] | None = None
    """Called with all reduced gradients of a bucket, 1-D; it may change them in place."""
    hook_stream: Any = None
    """The stream that the hook runs on; None: that of the reduction."""
