"""The policies that users choose for a call of ``fully_shard``, frozen values; codec errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fullshard.comm import INT4, Blocks, Cast, Codec, round_trip
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
class WirePolicy:
    """The formats in which parameters and gradients of fp32 or 16 bits are sent.

    Those of other dtypes are sent as they are. The shards and all full values (state dicts,
    ``unshard_params``) stay exact. With one shard rank nothing is sent, so nothing is quantized.
    See ``docs/wire.md``.
    """

    gather: str | None = None
    """The format of gathered parameters: "bf16", or "int8" or "fp8" (e4m3), which take one byte an
    element and an fp32 scale for each block. None: the compute dtype."""
    reduce: str | None = None
    """The format of reduced gradients; sums are in fp32 on every backend. "bf16" (gradients of 16
    bits keep their dtype), "int8", "fp8", or "int4", which takes half a byte an element and a bf16
    scale for each block. None: the dtype of the reduction, summed by the backend."""
    block: int = 64
    """Elements of a block, a power of two from 16 to 4096."""

    def __post_init__(self) -> None:
        for name, offered in (("gather", [*_WIRES][:-1]), ("reduce", [*_WIRES])):
            value = getattr(self, name)
            if value is not None and value not in offered:
                why = "; in 4 bits only gradients travel, reduce='int4'" if value == "int4" else ""
                raise ConfigError(
                    f"WirePolicy({name}={value!r}): expected None or one of "
                    f"{', '.join(map(repr, offered))}{why}"
                )
        if not isinstance(self.block, int) or self.block not in _BLOCKS:
            raise ConfigError(
                f"WirePolicy(block={self.block!r}): expected a power of two from {_BLOCKS[0]} to "
                f"{_BLOCKS[-1]}"
            )

    @classmethod
    def parse(cls, text: str) -> WirePolicy:
        """Return the policy described by ``text``, such as ``"gather=int8,reduce=bf16"``.

        Raises:
            ConfigError: ``text`` describes no policy.
        """
        given: dict[str, Any] = dict(part.strip().partition("=")[::2] for part in text.split(","))
        if given.keys() - {"gather", "reduce", "block"}:
            raise ConfigError(
                f"{text!r} is no WirePolicy: expected some of gather=, reduce= and block=, with "
                'commas in between, such as "gather=int8,reduce=bf16"'
            )
        if given.get("block", "").isdecimal():
            given["block"] = int(given["block"])
        return cls(**given)

    def __str__(self) -> str:
        """Return the text that ``parse`` reads; empty if everything travels as it is."""
        named = {"gather": self.gather, "reduce": self.reduce}
        parts = [f"{name}={value}" for name, value in named.items() if value is not None]
        if self.has_blocks and self.block != WirePolicy.block:
            parts.append(f"block={self.block}")
        return ",".join(parts)

    @property
    def has_blocks(self) -> bool:
        """True if anything travels in blocks."""
        return not {self.gather, self.reduce} <= {None, "bf16"}

    @property
    def gathering(self) -> Codec | None:
        """The codec of parameters; None: no codec."""
        return self._codec(self.gather)

    @property
    def reducing(self) -> Codec | None:
        """The codec of gradients; None: no codec."""
        return self._codec(self.reduce)

    def _codec(self, name: str | None) -> Codec | None:
        if name is None:
            return None
        dtype = _WIRES[name]
        return Cast(dtype) if dtype is torch.bfloat16 else Blocks(dtype, self.block)


_WIRES = {
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": INT4,  # too coarse for parameters: the last is for gradients only
}
_BLOCKS = tuple(1 << power for power in range(4, 13))


@dataclass(frozen=True)
class ReducePolicy:
    """The treatment of a unit's gradients, as set after ``fully_shard``; a frozen value."""

    divide_by: float | None = None
    """The divisor of the sum over all ranks; None: the number of ranks."""
    fill_absent: bool = False
    """True if parameters that no rank has a gradient for get zeros instead of None."""
    inspect: Callable[[Sequence[str], Sequence[Tensor | None]], object] | None = None
    """A function called with names and this rank's unsharded gradients, before they are reduced."""
    hook: Callable[[Tensor], object] | None = None
    """A function called with all reduced gradients of a bucket, 1-D, to change in place."""
    hook_stream: Any = None
    """The stream on which the hook runs; None: the stream of the reduction."""


class WireErrors(NamedTuple):
    """Relative errors of the data that this rank sent: the norm of the error by that of the values.

    None: nothing was encoded.
    """

    gathered: float | None
    """The error of this rank's shards, with which all ranks computed."""
    reduced: float | None
    """The error of this rank's gradients, shard means on their way to replicas included.

    The errors of ranks are independent, so the mean over many ranks has a smaller one."""


class WireCheck:
    """A meter of the error that codecs introduce, by kind of transfer, while ``enabled``."""

    def __init__(self) -> None:
        self.enabled = False
        self._found: dict[str, list[Tensor]] = {}  # errors and values, one pair for each transfer

    def look(self, what: str, codec: Codec, values: Tensor) -> None:
        """Measure the error of 2-D ``values`` after ``codec``, if enabled; sends nothing."""
        if self.enabled:
            self.compare(what, values, round_trip(codec, values))

    def compare(self, what: str, exact: Tensor, received: Tensor) -> None:
        """Accumulate the error of ``received`` against ``exact``."""
        exact = exact.float()
        squares = [one.square().sum(dtype=torch.float64) for one in (received - exact, exact)]
        self._found.setdefault(what, []).append(torch.stack(squares))

    def take(self, what: str) -> list[Tensor]:
        """Return and clear the pairs of ``what``; their kernels may still run."""
        return self._found.pop(what, [])


def relative_error(pairs: Sequence[Tensor]) -> float | None:
    """Return the error by all ``pairs`` together; the host waits for the device."""
    if not pairs:
        return None
    if pairs[0].device.type != "cpu":
        torch.accelerator.synchronize()  # several streams have computed them
    errors, values = (
        math.fsum(column) for column in zip(*(p.tolist() for p in pairs), strict=True)
    )
    return math.sqrt(errors / values) if values else math.sqrt(errors)
