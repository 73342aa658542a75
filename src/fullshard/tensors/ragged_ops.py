"""What can be done to RaggedTensors: the operations that mean the same on intervals.

    pointwise       on this rank's interval; plain tensors without dims are the same for all
    lists of them   foreach and fused operations of optimizers, tensor by tensor
    whole           sums, norms and the like over all elements: on the interval, then one all-reduce
    random fills    of the whole tensor, of which the interval is kept, so that cuts do not matter

Everything else refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.comm import all_reduce
from fullshard.errors import RaggedOperationError
from fullshard.tensors.ragged_shard import RaggedShard

__all__ = ["run_on_intervals"]

aten = torch.ops.aten

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_ALIKE = "cut into the same intervals on the same mesh"


def run_on_intervals(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do ``op``, of which some tensor is a RaggedTensor.

    Raises:
        RaggedOperationError: it does not mean the same on intervals.
    """
    handler = _handler_of(op)
    if handler is None:
        raise _refusal(op, args, kwargs)
    return handler(op, args, kwargs)


def _handler_of(op: Any) -> Handler | None:
    handler = _HANDLERS.get(op)
    if handler is None:
        name = op.overloadpacket.__name__
        if name.startswith(("_foreach_", "_fused_")):
            handler = _on_lists
        elif torch.Tag.pointwise in op.tags:
            handler = _pointwise
        if handler is not None:
            _HANDLERS[op] = handler
    return handler


def _pointwise(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On this rank's elements of every tensor."""
    like = _like(op, (*args, *kwargs.values()))
    kwargs.pop("memory_format", None)  # an interval has one dim
    locals_in = [_operand(op, arg, like) for arg in args]
    named = {name: _operand(op, arg, like) for name, arg in kwargs.items()}
    result = op(*locals_in, **named)
    if not isinstance(result, Tensor):
        return result
    for arg, local in zip((*args, *kwargs.values()), (*locals_in, *named.values()), strict=True):
        if local is result:
            return arg  # it was written in place
    return _torch.dtensor_like(like, result)


def _operand(op: Any, arg: Any, like: DTensor) -> Any:
    """What stands for ``arg`` on this rank."""
    if not isinstance(arg, Tensor):
        return arg
    if isinstance(arg, DTensor):
        if arg.placements == like.placements and arg.shape == like.shape:
            return _torch.local_of(arg)
        if arg.dim() == 0 and all(placement.is_replicate() for placement in arg.placements):
            return _torch.local_of(arg)
    elif arg.dim() == 0:
        return arg
    raise RaggedOperationError(
        f"{op}: got a {type(arg).__name__} of shape {tuple(arg.shape)} beside a RaggedTensor of "
        f"shape {tuple(like.shape)}; expected a tensor {_ALIKE}, or one without dims"
    )


def _on_lists(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lists of tensors, each of which must be cut like the first list's tensor at its place."""
    lists = [arg for arg in (*args, *kwargs.values()) if _is_tensors(arg)]
    shown = lists[0]
    if not all(isinstance(tensor, DTensor) for tensor in shown):
        raise _refusal(op, args, kwargs)
    result = op(
        *(_operands(op, arg, shown) for arg in args),
        **{name: _operands(op, arg, shown) for name, arg in kwargs.items()},
    )
    if result is None:
        return None
    return [_torch.dtensor_like(one, local) for one, local in zip(shown, result, strict=True)]


def _operands(op: Any, arg: Any, shown: Sequence[DTensor]) -> Any:
    if _is_tensors(arg):
        return [_operand(op, one, like) for one, like in zip(arg, shown, strict=True)]
    return _torch.local_of(arg) if isinstance(arg, DTensor) and arg.dim() == 0 else arg


def _is_tensors(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and bool(arg) and isinstance(arg[0], Tensor)


def _like(op: Any, values: Iterable[Any]) -> DTensor:
    """The first RaggedTensor among ``values``."""
    found: DTensor = next(value for value in values if is_ragged(value))
    return found


def is_ragged(value: Any) -> bool:
    """Whether ``value`` is placed as a RaggedTensor."""
    return isinstance(value, DTensor) and isinstance(value.placements[0], RaggedShard)


# operations of one tensor


def _copy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``copy_``: from what is cut alike, from a whole plain tensor, or into a plain tensor."""
    target, source = args[0], args[1]
    if not is_ragged(target):
        target.copy_(source.full_tensor())
    elif isinstance(source, DTensor):
        if not is_ragged(source):
            source = source.full_tensor()
            return _copy(op, (target, source, *args[2:]), kwargs)
        _torch.local_of(target).copy_(_operand(op, source, target), *args[2:], **kwargs)
    else:
        _torch.local_of(target).copy_(_own_part(source, target), *args[2:], **kwargs)
    return target


def _own_part(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's interval of ``whole``, which must broadcast to the shape of ``like``."""
    held = cast("RaggedShard", like.placements[0]).interval(like.device_mesh.get_local_rank())
    return whole.expand(like.shape).reshape(-1)[held.start : held.stop]


def _made_like(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``zeros_like`` and its like: the same cuts, perhaps of another dtype or device."""
    kwargs.pop("memory_format", None)
    return _torch.dtensor_like(args[0], op(_torch.local_of(args[0]), *args[1:], **kwargs))


def _masked_put(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[mask] = value``, which is pointwise where the mask is cut like ``x``."""
    target, indices, value, *accumulate = args
    mask: Any = indices[0] if len(indices) == 1 else None
    if not is_ragged(mask) or mask.dtype is not torch.bool or value.dim() or any(accumulate):
        raise _refusal(op, args, kwargs)
    _torch.local_of(target).masked_fill_(_operand(op, mask, target), value)
    return target


def _in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    op(_torch.local_of(args[0]), *args[1:], **kwargs)
    return args[0]


def _same_shape(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``view`` and its like, to the shape that the tensor has."""
    if tuple(args[1]) != tuple(args[0].shape):
        raise _refusal(op, args, kwargs)
    return _torch.dtensor_like(args[0], _torch.local_of(args[0]).detach())


def _random_fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor and keep the interval, as the unsharded model would have it."""
    target = args[0]
    local = _torch.local_of(target)
    whole = torch.empty(target.shape, dtype=target.dtype, device=local.device)
    op(whole, *args[1:], **kwargs)
    if not local.is_meta:
        local.copy_(_own_part(whole, target))
    return target


def _random_like(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    new = torch.empty_like(args[0], **kwargs)
    fill = {aten.rand_like.default: Tensor.uniform_, aten.randn_like.default: Tensor.normal_}[op]
    return fill(new)


# operations over all elements


def _all_reduced(values: Tensor, like: DTensor, *, is_max: bool = False) -> Tensor:
    all_reduce(values, like.device_mesh.get_group(), is_max=is_max)
    return values


def _sum(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    local = op(_torch.local_of(args[0]), **kwargs)
    return _all_reduced(local, args[0])


def _mean(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _sum(aten.sum.default, args, kwargs).div_(args[0].numel())


def _extreme(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``max`` and ``min`` of all elements; a NaN anywhere is the result, as in torch."""
    local = _torch.local_of(args[0])
    if not args[0].numel() or not local.dtype.is_floating_point:
        raise _refusal(op, args, kwargs)
    sign = 1 if op is aten.max.default else -1
    own = local.mul(sign).max() if local.numel() else local.new_tensor(-math.inf)
    sent = torch.stack([own.nan_to_num(0.0, math.inf, -math.inf), own.isnan().to(own.dtype)])
    _all_reduced(sent, args[0], is_max=True)
    return torch.where(sent[1] > 0, math.nan, sent[0] * sign)


def _any(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found = _torch.local_of(args[0]).any().to(torch.int32)
    return _all_reduced(found, args[0], is_max=True).bool()


def _all(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    missed = _torch.local_of(args[0]).all().logical_not().to(torch.int32)
    return _all_reduced(missed, args[0], is_max=True).logical_not()


def _equal(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    one, other = args
    if one.shape != other.shape:
        return False
    like = _like(op, args)
    here = torch.equal(_operand(op, one, like), _operand(op, other, like))
    differs = torch.tensor(int(not here), device=_torch.local_of(like).device)
    return not _all_reduced(differs, like, is_max=True).item()


def _vector_norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``linalg.vector_norm(x, ord, dim, keepdim)`` over all elements."""
    order = args[1] if len(args) > 1 else 2
    dims = args[2] if len(args) > 2 else None
    keepdim = len(args) > 3 and args[3]
    if keepdim or (dims is not None and len(dims) < args[0].dim()):
        raise _refusal(op, args, kwargs)
    return _norms([args[0]], order, kwargs.get("dtype"))[0]


def _norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _norms([args[0]], 2 if len(args) < 2 or args[1] is None else args[1], None)[0]


def _foreach_norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return _norms(args[0], order, kwargs.get("dtype"))


def _norms(shown: Sequence[DTensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norms of whole tensors that are cut over the same ranks, by one all-reduce."""
    wide = torch.promote_types(dtype or shown[0].dtype, torch.float32)
    is_max = math.isinf(order)
    if order <= 0:
        raise RaggedOperationError(f"norm of order {order} of a RaggedTensor: expected one above 0")
    parts = [
        torch.linalg.vector_norm(_torch.local_of(one), order, dtype=wide)
        if _torch.local_of(one).numel()
        else torch.zeros((), dtype=wide, device=one.device)
        for one in shown
    ]
    stacked = torch.stack(parts)
    sent = stacked if is_max else stacked.pow(order)
    if is_max:  # a largest value may lose a NaN on the way
        sent = torch.stack([sent.nan_to_num(0.0, math.inf), sent.isnan().to(wide)])
        _all_reduced(sent, shown[0], is_max=True)
        whole = torch.where(sent[1] > 0, math.nan, sent[0])
    else:
        whole = _all_reduced(sent, shown[0]).pow(1.0 / order)
    return list(whole.to(dtype or shown[0].dtype).unbind())


def _unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What a GradScaler does: an infinity on one rank counts for all."""
    grads, found_inf, inverse_scale = args
    like = _like(op, grads)
    op(
        [_torch.local_of(g) if isinstance(g, DTensor) else g for g in grads],
        found_inf,
        inverse_scale,
    )
    _all_reduced(found_inf, like, is_max=True)


def _refusal(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedOperationError:
    found = (value for value in (*args, *kwargs.values()) if is_ragged(value))
    shapes = ", ".join(str(tuple(value.shape)) for value in found) or "a list of tensors"
    return RaggedOperationError(
        f"{op} on RaggedTensor {shapes}: a rank holds an interval of the flattened tensor, which "
        "has no rows, columns or single elements. Call full_tensor() first, work inside of "
        "unshard() and reshard(), or shard with layout=PerParameter(), whose DTensors know "
        "matrices; optimizers must be element-wise, such as AdamW. If a forward did this, it was "
        "not that of the module given to fully_shard, which unshards it"
    )


_HANDLERS: dict[Any, Handler] = {
    aten.copy_.default: _copy,
    aten.equal.default: _equal,
    aten.index_put_.default: _masked_put,
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
    **dict.fromkeys(
        (
            aten.detach.default,
            aten.alias.default,
            aten._to_copy.default,
            aten.clone.default,
            aten.empty_like.default,
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.full_like.default,
        ),
        _made_like,
    ),
    **dict.fromkeys(
        (
            aten.fill_.Scalar,
            aten.fill_.Tensor,
            aten.zero_.default,
        ),
        _in_place,
    ),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default), _same_shape),
    **dict.fromkeys(
        (
            aten.uniform_.default,
            aten.normal_.default,
            aten.bernoulli_.float,
            aten.exponential_.default,
        ),
        _random_fill,
    ),
    **dict.fromkeys((aten.rand_like.default, aten.randn_like.default), _random_like),
}
