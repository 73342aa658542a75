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
from fullshard.tensors.parts import is_partial

aten = torch.ops.aten


def _on_locals(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Apply ``op`` to a DTensor, and to operands that are placed alike or numbers."""
    if is_partial(target) or not all(fits(arg, target) for arg in args):
        return _dtensor.default_dtensor_op(op, args, kwargs)
    result = op(*map(_local, args), **kwargs)
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
    result = op(*([*map(_local, arg)] if _is_list(arg) else arg for arg in args), **kwargs)
    if not _is_list(result):
        return result  # an operation in place
    return [*map(_placed_like, targets, result)]


def _placed_like(target: Tensor, local: Tensor) -> Tensor:
    return _dtensor.dtensor_like(target, local) if isinstance(target, DTensor) else local


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


def _local(operand: Any) -> Any:
    return _dtensor.local_of(operand) if isinstance(operand, DTensor) else operand


def _is_list(arg: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(arg, (list, tuple))


# Of operations on lists, those that PyTorch's DTensors lack, and the fused ones. Others would take
# longer this way, and are handled once somebody mixes lists, which PyTorch refuses.
_ON_LISTS = (
    aten._foreach_copy_,
    aten._foreach_sign_,
    aten._fused_adagrad_,
    aten._fused_adam_,
    aten._fused_adamw_,
    aten._fused_sgd_,
)
# Of operations on single tensors, those that take numbers, with which PyTorch's DTensors are slow.
POINTWISE_HANDLERS = {
    aten.div.Tensor: _on_locals,
    aten.div_.Tensor: _on_locals,
    aten.mul_.Tensor: _on_locals,
    **{getattr(op, name): _on_lists for op in _ON_LISTS for name in op.overloads()},
}
_MIXED = (
    aten._foreach_abs,
    aten._foreach_abs_,
    aten._foreach_add,
    aten._foreach_add_,
    aten._foreach_addcdiv,
    aten._foreach_addcdiv_,
    aten._foreach_addcmul,
    aten._foreach_addcmul_,
    aten._foreach_clamp_max_,
    aten._foreach_clamp_min_,
    aten._foreach_copy_,
    aten._foreach_div,
    aten._foreach_div_,
    aten._foreach_lerp_,
    aten._foreach_maximum_,
    aten._foreach_mul,
    aten._foreach_mul_,
    aten._foreach_neg,
    aten._foreach_neg_,
    aten._foreach_pow,
    aten._foreach_pow_,
    aten._foreach_reciprocal,
    aten._foreach_reciprocal_,
    aten._foreach_rsqrt,
    aten._foreach_rsqrt_,
    aten._foreach_sign,
    aten._foreach_sign_,
    aten._foreach_sqrt,
    aten._foreach_sqrt_,
    aten._foreach_sub,
    aten._foreach_sub_,
    aten._foreach_zero_,
)
MIXED_LIST_HANDLERS = {
    getattr(op, name): _on_lists
    for op in _MIXED
    for name in op.overloads()
    if not name.endswith("out")
}
