"""Mixed precision of the flat face: casts of inputs and buffers, and what eval computes in."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.engine import Engine, MixedPrecisionPolicy, Unit
from fullshard.errors import ArgumentTypeError, ProtocolError
from fullshard.flat.options import MixedPrecision
from fullshard.tensors import find_tensors, map_tensors


def as_mixed_precision(given: Any) -> MixedPrecision:
    """What the user gave, by its fields; PyTorch's own lacks those that are ours alone.

    What it lacks may be asked for by PyTorch's environment variable.

    Raises:
        ArgumentTypeError: it has other fields.
    """
    given = MixedPrecision() if given is None else given
    if not hasattr(given, "cast_root_forward_inputs"):
        raise ArgumentTypeError(
            f"FullyShardedDataParallel(mixed_precision={given!r}): expected a MixedPrecision"
        )
    fields = MixedPrecision.__dataclass_fields__
    options = MixedPrecision(**{n: getattr(given, n) for n in fields if hasattr(given, n)})
    options._module_classes_to_ignore = tuple(options._module_classes_to_ignore)
    options.full_precision_in_eval |= os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"
    return options


@dataclass
class Precision:
    """What one wrapper casts, and when."""

    options: MixedPrecision
    buffers: dict[tuple[nn.Module, str], torch.dtype] = field(default_factory=dict)
    """Own dtypes of buffers that were cast, by module and name."""
    in_eval: bool = False
    is_exempt: bool = False
    """Whether the module is of a class that mixed precision around it leaves out."""

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
        assert self.options.param_dtype is not None
        return _cast_to(self.options.param_dtype, args)

    def run_exempt(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run ``module`` on inputs in its own dtype; its outputs are in that of the last input."""
        own = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        given = [t.dtype for t in find_tensors((args, kwargs)) if t.is_floating_point()]
        args, kwargs = _cast_to(own, args), _cast_to(own, kwargs)
        output = module(*args, **kwargs)
        return _cast_to(given[-1], output) if given else output

    def cast_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Cast floating-point buffers, once; in full precision they have their own dtypes."""
        dtype = self.options.buffer_dtype
        if dtype is None:
            return
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is None or not buffer.is_floating_point():
                    continue
                wanted = self.own_dtype(module, name, buffer) if self.in_eval else dtype
                if buffer.dtype != wanted:
                    self.buffers.setdefault((module, name), buffer.dtype)
                    module._buffers[name] = buffer.to(wanted)

    def own_dtype(self, module: nn.Module, name: str, buffer: Tensor) -> torch.dtype:
        """The dtype that a buffer had before it was cast."""
        return self.buffers.get((module, name), buffer.dtype)

    def keep_reduced(self, unit: Unit) -> None:
        """Leave gradients in the dtype of reduction, if that was asked for."""
        dtype = self.policy.reduce_dtype
        if self.options.keep_low_precision_grads and dtype is not None:
            for bucket in unit.buckets:
                bucket.rewire(grad_dtype=dtype)

    def follow(self, unit: Unit, engine: Engine, *, training: bool) -> None:
        """Compute in full precision in eval, if that was asked for.

        Raises:
            ProtocolError: in the middle of a forward, of a module around this one that does not
                ask for it.
        """
        if not self.options.full_precision_in_eval or self.in_eval is (not training):
            return
        if not engine.scheduler.idle:
            raise ProtocolError(
                f"unit {unit.name or '(root)'} has MixedPrecision(full_precision_in_eval=True) and "
                f"went {'out of' if training else 'into'} eval(), but the wrapper whose forward is "
                "running has not; give it to the outermost wrapper too, and do not change modes "
                "in a forward"
            )
        engine.reset_wires([unit])
        self.in_eval = not training
        policy = self.policy if training else MixedPrecisionPolicy()
        for bucket in unit.buckets:
            bucket.rewire(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype)


def _cast_to(dtype: torch.dtype, args: Any) -> Any:
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, args)
