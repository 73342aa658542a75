"""Mixed precision of the flat face: casts of inputs and buffers, and what eval computes in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.engine import Engine, MixedPrecisionPolicy, Unit
from fullshard.errors import ArgumentTypeError
from fullshard.flat.options import MixedPrecision
from fullshard.tensors import map_tensors

__all__ = ["Precision", "as_mixed_precision"]


def as_mixed_precision(given: Any) -> MixedPrecision:
    """What the user gave, by its fields; PyTorch's own lacks those that are ours alone.

    Raises:
        ArgumentTypeError: it has other fields.
    """
    if given is None:
        return MixedPrecision()
    fields = MixedPrecision.__dataclass_fields__
    if not hasattr(given, "cast_root_forward_inputs"):
        raise ArgumentTypeError(
            f"FullyShardedDataParallel(mixed_precision={given!r}): expected a MixedPrecision"
        )
    return MixedPrecision(**{name: getattr(given, name) for name in fields if hasattr(given, name)})


@dataclass
class Precision:
    """What one wrapper casts, and when."""

    options: MixedPrecision
    buffers: dict[tuple[int, str], torch.dtype] = field(default_factory=dict)
    """Own dtypes of buffers that were cast, by module and name."""
    in_eval: bool = False

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """For the engine; inputs are cast here."""
        reduce_dtype = self.options.reduce_dtype or self.options.param_dtype
        return MixedPrecisionPolicy(
            self.options.param_dtype, reduce_dtype, cast_forward_inputs=False
        )

    def casts_inputs(self, *, is_root: bool) -> bool:
        """Whether a forward casts its inputs."""
        options = self.options
        if options.param_dtype is None or (self.in_eval and options.full_precision_in_eval):
            return False
        return options.cast_root_forward_inputs if is_root else options.cast_forward_inputs

    def cast(self, args: Any) -> Any:
        """Floating-point tensors in ``args`` in the dtype of computation."""
        dtype = self.options.param_dtype
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, args)

    def cast_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Cast floating-point buffers, once."""
        dtype = self.options.buffer_dtype
        if dtype is None:
            return
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                    self.buffers.setdefault((id(module), name), buffer.dtype)
                    module._buffers[name] = buffer.to(dtype)

    def own_dtype(self, module: nn.Module, name: str, buffer: Tensor) -> torch.dtype:
        """The dtype that a buffer had before it was cast."""
        return self.buffers.get((id(module), name), buffer.dtype)

    def follow(self, unit: Unit, engine: Engine, *, training: bool) -> None:
        """Compute in full precision in eval, if that was asked for."""
        if not self.options.full_precision_in_eval or self.in_eval is (not training):
            return
        self.in_eval = not training
        engine.reset_wires([unit])
        policy = self.policy if training else MixedPrecisionPolicy()
        for bucket in unit.buckets:
            bucket.rewire(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype)
