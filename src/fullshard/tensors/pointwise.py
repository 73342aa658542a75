"""Operations of optimizers on DTensors, applied to their local tensors.

PyTorch first finds out where the result lies, which takes longer than the operation if tensors are
small, and it refuses lists that mix meshes, or DTensors and plain tensors. An operation that treats
each element by itself needs none of that if its operands are placed alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard._torch import dtensor as _dtensor
from fullshard.tensors.form import local_part, shown_like
from fullshard.tensors.parts import aten_ops, is_partial

aten = torch.ops.aten


def _on_locals(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Apply ``op`` to a DTensor, and to operands that are placed alike or numbers."""
    if is_partial(target) or not all(fits(arg, target) for arg in args):
        return _dtensor.default_dtensor_op(op, args, kwargs)
    result = op(*map(local_part, args), **kwargs)
    return target if result is _dtensor.local_of(target) else _dtensor.dtensor_like(target, result)


def _on_lists(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Apply ``op`` to lists of tensors, alike in each position, and to numbers."""
    targets = args[0]
    if (
        any(isinstance(one, DTensor) and is_partial(one) for one in targets)
        or not all(_fits_each(arg, targets) for arg in args)
        or any(isinstance(value, DTensor) for value in kwargs.values())
    ):
        return _dtensor.default_dtensor_op(op, args, kwargs)
    result = op(*([*map(local_part, arg)] if _is_list(arg) else arg for arg in args), **kwargs)
    if not _is_list(result):
        return result  # an operation in place
    return [*map(shown_like, targets, result)]


def fits(operand: Any, target: Tensor) -> bool:
    """Return whether ``operand`` is placed like ``target``, or is one number on all ranks.

    A plain ``target`` goes with plain tensors of any shape.
    """
    if isinstance(operand, DTensor):
        if isinstance(target, DTensor) and _dtensor.are_placed_alike(operand, target):
            return True
        return operand.dim() == 0 and all(one.is_replicate() for one in operand.placements)
    if isinstance(operand, Tensor):
        return operand.dim() == 0 or not isinstance(target, DTensor)
    return True


def _fits_each(arg: Any, targets: Iterable[Tensor]) -> bool:
    return all(map(fits, arg, targets)) if _is_list(arg) else not isinstance(arg, Tensor)


def _is_list(arg: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(arg, (list, tuple))


def _overloads(kind: str, names: str) -> list[Any]:
    """Return all overloads of these operations on lists, such as "add_" of the kind "_foreach"."""
    found = [getattr(aten, f"{kind}_{name}") for name in names.split()]
    return [getattr(op, overload) for op in found for overload in op.overloads()]


# Operations on single tensors that take numbers, with which PyTorch's DTensors are slow; operations
# on lists that they lack; and the fused ones. Other operations on lists would be slower this way.
# ``MIXED_LIST_HANDLERS`` has those, for lists that PyTorch refuses.
POINTWISE_HANDLERS = {
    **dict.fromkeys(aten_ops("div.Tensor div_.Tensor mul_.Tensor"), _on_locals),
    **dict.fromkeys(_overloads("_foreach", "copy_ sign_"), _on_lists),
    **dict.fromkeys(_overloads("_fused", "adagrad_ adam_ adamw_ sgd_"), _on_lists),
}
_MIXED = _overloads(
    "_foreach",
    "abs abs_ add add_ addcdiv addcdiv_ addcmul addcmul_ clamp_max_ clamp_min_ copy_ div div_ lerp_"
    " maximum_ mul mul_ neg neg_ pow pow_ reciprocal reciprocal_ rsqrt rsqrt_ sign sign_ sqrt sqrt_"
    " sub sub_ zero_",
)
MIXED_LIST_HANDLERS = {op: _on_lists for op in _MIXED if not op._overloadname.endswith("out")}
