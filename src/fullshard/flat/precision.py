"""Cast inputs and buffers of ``FullyShardedDataParallel``, and choose the dtypes in eval."""

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
    """Return a copy of the user's ``MixedPrecision``, which may be PyTorch's class or None.

    PyTorch's class lacks ``full_precision_in_eval``, which PyTorch's environment variable sets.

    Raises:
        ArgumentTypeError: if ``given`` has other fields.
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
    """The mixed precision of one wrapper and its present state."""

    options: MixedPrecision
    buffers: dict[tuple[nn.Module, str], torch.dtype] = field(default_factory=dict)
    """The original dtypes of buffers that were cast, by module and name."""
    in_eval: bool = False
    is_exempt: bool = False
    """True if the module's class is in the ``_module_classes_to_ignore`` of an outer wrapper."""

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The policy for the engine, without casts of inputs, which this class does."""
        reduce_dtype = self.options.reduce_dtype or self.options.param_dtype
        return MixedPrecisionPolicy(
            self.options.param_dtype, reduce_dtype, cast_forward_inputs=False
        )

    def casts_inputs(self, *, is_root: bool, has_params: bool) -> bool:
        """Return whether a forward casts its inputs.

        As in PyTorch, the root obeys both options, because it is also a wrapper like the others,
        and a wrapper whose parameters are all in inner ones obeys the root's option only.
        """
        options = self.options
        if options.param_dtype is None or (self.in_eval and options.full_precision_in_eval):
            return False
        as_root = is_root and options.cast_root_forward_inputs
        return as_root or (has_params and options.cast_forward_inputs)

    def cast(self, args: Any) -> Any:
        """Return ``args`` with floating-point tensors cast to ``param_dtype``."""
        assert self.options.param_dtype is not None
        return _cast_to(self.options.param_dtype, args)

    def run_exempt(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run ``module`` in its own dtype, and cast outputs to the dtype of the last input."""
        own = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        given = [t.dtype for t in find_tensors((args, kwargs)) if t.is_floating_point()]
        args, kwargs = _cast_to(own, args), _cast_to(own, kwargs)
        output = module(*args, **kwargs)
        return _cast_to(given[-1], output) if given else output

    def cast_buffers(
        self,
        modules: Iterable[nn.Module],
        cast: dict[int, tuple[Tensor, Tensor]],
        *,
        is_lent: bool,
    ) -> None:
        """Cast floating-point buffers to ``buffer_dtype`` or, in full precision, back again.

        ``cast``: the buffers cast so far, old and new, by the id of the old one, so that a buffer
        of several modules stays one. The old one may be saved for a backward.
        """
        dtype = self.options.buffer_dtype
        if dtype is None:
            return
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is None or not buffer.is_floating_point():
                    continue
                is_full = self.in_eval or is_lent
                own = self.buffers.get((module, name), buffer.dtype)
                wanted = own if is_full else dtype
                if buffer.dtype != wanted:
                    self.buffers.setdefault((module, name), buffer.dtype)
                    if id(buffer) not in cast:
                        cast[id(buffer)] = buffer, buffer.to(wanted)
                    module._buffers[name] = cast[id(buffer)][1]

    def keep_reduced(self, unit: Unit) -> None:
        """Keep reduced gradients in the dtype of reduction with ``keep_low_precision_grads``."""
        dtype = self.policy.reduce_dtype
        if self.options.keep_low_precision_grads and dtype is not None:
            for bucket in unit.buckets:
                bucket.rewire(grad_dtype=dtype)

    def follow(self, unit: Unit, engine: Engine, *, training: bool) -> None:
        """Switch to full precision in eval, and back in training, if ``options`` say so.

        Raises:
            ProtocolError: if this would happen during a forward, because the outermost wrapper
                lacks the option or because modes were changed during the forward.
        """
        if not self.options.full_precision_in_eval or self.in_eval is (not training):
            return
        if not engine.scheduler.idle:
            raise ProtocolError(
                f"unit {unit.shown_name} has MixedPrecision(full_precision_in_eval=True) and "
                f"went {'out of' if training else 'into'} eval(), but the wrapper whose forward is "
                "running has not. Give the option to the outermost wrapper too, and do not change "
                "modes in a forward"
            )
        engine.reset_wires([unit])
        self.in_eval = not training
        policy = self.policy if training else MixedPrecisionPolicy()
        for bucket in unit.buckets:
            bucket.rewire(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype)


def _cast_to(dtype: torch.dtype, args: Any) -> Any:
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, args)
