"""Operations over all elements of RaggedTensors: run on the intervals, then all-reduced.

The all-reduces are sums or maxima over the mesh dims on which a tensor is cut, for tensor
parallelism or into intervals; replicated elements count once, see ``spread_of``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard._torch import dtensor as _dtensor
from fullshard.errors import RaggedOperationError
from fullshard.tensors.form import local_part
from fullshard.tensors.parts import Spread, spread_of
from fullshard.tensors.ragged_operands import Handler, first_ragged, operand, refusal

aten = torch.ops.aten


def _spread(tensor: Tensor) -> Spread:
    """Return the spread of ``tensor``, where a plain tensor is the same on all ranks."""
    if not isinstance(tensor, DTensor):
        return Spread((), 1)
    return spread_of(tensor.device_mesh, tensor.placements)


def _sum(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    total, dtype = _wide_sum(args[0], kwargs)
    return total.to(dtype)


def _mean(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    total, dtype = _wide_sum(args[0], kwargs)
    if not (dtype.is_floating_point or dtype.is_complex):
        raise refusal(op, args, kwargs)
    return total.div_(args[0].numel()).to(dtype)


def _wide_sum(shown: Any, kwargs: dict[str, Any]) -> tuple[Tensor, torch.dtype]:
    """Return the sum of all elements, in fp32 or wider as in torch, and the requested dtype."""
    local = _dtensor.local_of(shown)
    dtype = kwargs.get("dtype")
    if dtype is None:
        is_exact = not (local.dtype.is_floating_point or local.dtype.is_complex)
        dtype = torch.int64 if is_exact else local.dtype
    is_exact = not (dtype.is_floating_point or dtype.is_complex)
    wide = dtype if is_exact else torch.promote_types(dtype, torch.float32)
    return _spread(shown).total(local.sum(dtype=wide)), dtype


def _extreme(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the ``max`` or ``min`` of all elements; NaN if any element is NaN, as in torch."""
    local = _dtensor.local_of(args[0])
    if not args[0].numel() or not local.dtype.is_floating_point:
        raise refusal(op, args, kwargs)
    sign = 1 if op is aten.max.default else -1
    own = local.mul(sign).max() if local.numel() else local.new_tensor(-math.inf)
    return _spread(args[0]).largest(own) * sign


def _any(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found = _dtensor.local_of(args[0]).any().to(torch.int32)
    return _spread(args[0]).largest(found).bool()


def _all(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    missed = _dtensor.local_of(args[0]).all().logical_not().to(torch.int32)
    return _spread(args[0]).largest(missed).logical_not()


def _equal(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    one, other = args
    if one.shape != other.shape:
        return False
    like = first_ragged(args)
    here = torch.equal(operand(op, one, like), operand(op, other, like))
    differs = torch.tensor(int(not here), device=_dtensor.local_of(like).device)
    return not _spread(like).largest(differs).item()


def _vector_norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run ``linalg.vector_norm(x, ord, dim, keepdim)`` over all elements."""
    order = args[1] if len(args) > 1 else 2
    dims = args[2] if len(args) > 2 else None
    keepdim = len(args) > 3 and args[3]
    if keepdim or (dims is not None and len(dims) < args[0].dim()):
        raise refusal(op, args, kwargs)
    return _norms([args[0]], order, kwargs.get("dtype"))[0]


def _norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _norms([args[0]], 2 if len(args) < 2 or args[1] is None else args[1], None)[0]


def _foreach_norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return _norms(args[0], order, kwargs.get("dtype"))


def _norms(shown: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the norms of full tensors; those of equal spread share one all-reduce per group."""
    if order <= 0:
        raise RaggedOperationError(f"norm of order {order} of a RaggedTensor: expected one above 0")
    alike: dict[Spread, list[int]] = {}
    for number, one in enumerate(shown):
        alike.setdefault(_spread(one), []).append(number)
    norms: dict[int, Tensor] = {}
    for spread, numbers in alike.items():
        parts = [_local_norm(local_part(shown[number]), order, dtype) for number in numbers]
        for number, norm in zip(numbers, _joined(parts, order, spread), strict=True):
            norms[number] = norm.to(dtype or shown[number].dtype.to_real())
    return [norms[number] for number in range(len(shown))]


def _local_norm(local: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    """Return the norm of a local tensor, in fp32 or wider."""
    wide = torch.promote_types((dtype or local.dtype).to_real(), torch.float32)
    if not local.numel():
        return torch.zeros((), dtype=wide, device=local.device)
    local = local.abs() if local.is_complex() else local
    norm: Tensor = torch.linalg.vector_norm(local, order, dtype=wide)
    return norm


def _joined(parts: Sequence[Tensor], order: float, spread: Spread) -> tuple[Tensor, ...]:
    """Combine the norms of the ranks' parts into norms of full tensors."""
    stacked = torch.stack(list(parts))
    if math.isinf(order):
        return spread.largest(stacked).unbind()
    return spread.total(stacked.pow(order)).pow(1.0 / order).unbind()


def _unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients for a GradScaler; an infinity on one rank counts for all ranks."""
    grads, found_inf, inverse_scale = args
    op(list(map(local_part, grads)), found_inf, inverse_scale)
    groups = dict.fromkeys(group for grad in grads for group in _spread(grad).groups)
    found_inf.copy_(Spread(tuple(groups), 1).largest(found_inf))


WHOLE_HANDLERS: dict[Any, Handler] = {
    aten.equal.default: _equal,
    aten.sum.default: _sum,
    aten.mean.default: _mean,
    aten.max.default: _extreme,
    aten.min.default: _extreme,
    aten.any.default: _any,
    aten.all.default: _all,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
