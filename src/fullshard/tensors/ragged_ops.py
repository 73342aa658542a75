"""Operations that RaggedTensors support: those with the same meaning on intervals.

    pointwise       run on this rank's interval; plain tensors without dims are equal on all ranks.
    tensor lists    foreach and fused operations of optimizers, run tensor by tensor.
    whole           sums, norms and similar operations over all elements: all-reduced over the
                    mesh dims that cut a tensor; copies count once, see ``sharding_of``.
    random fills    draw the full tensor and keep the interval, so that cuts do not matter.

All other operations are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard._torch import dtensor as _dtensor
from fullshard.errors import RaggedOperationError
from fullshard.tensors.form import local_part, shown_like
from fullshard.tensors.parts import Sharding, aten_ops, part_like, sharding_of
from fullshard.tensors.pointwise import fits
from fullshard.tensors.ragged_cut import cut_of, is_ragged
from fullshard.tensors.random import RANDOM_FILLS, RANDOM_HANDLERS, RANDOM_LIKE
from fullshard.tensors.uses import raise_explained

aten = torch.ops.aten

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""A function of the operation, and of all positional and named arguments."""


def run_on_intervals(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op``, which has a RaggedTensor among its arguments.

    Raises:
        RaggedOperationError: if ``op`` has another meaning on intervals.
    """
    try:
        handler = _handler_of(op)
        if handler is None:
            raise _refusal(op, args, kwargs)
        return handler(op, args, kwargs)
    except RaggedOperationError as error:
        raise_explained((args, kwargs), error)
        raise


def _handler_of(op: Any) -> Handler | None:
    handler = _HANDLERS.get(op)
    if handler is None:
        if _is_of_elements(op):
            handler = _on_lists
        elif torch.Tag.pointwise in op.tags:
            handler = _pointwise
        if handler is not None:
            _HANDLERS[op] = handler
    return handler


def _is_of_elements(op: Any) -> bool:
    """Return whether ``op`` treats each element of each tensor in lists by itself."""
    name = op.overloadpacket.__name__
    if name in _FUSED or name in _LISTS_WITHOUT_TAG:
        return True
    if not name.startswith("_foreach_"):
        return False
    twin: Any = getattr(aten, name.removeprefix("_foreach_").removesuffix("_"), None)
    # With one list, the twin takes one tensor: maximum(x, y) is pointwise, as max(x, y) is.
    names = () if twin is None else twin.overloads()
    if op._overloadname in ("default", "out"):
        names = [one for one in names if one == "default"]
    return any(torch.Tag.pointwise in getattr(twin, one).tags for one in names)


_FUSED = {f"_fused_{name}_" for name in ("adagrad", "adam", "adamw", "sgd")}
_LISTS_WITHOUT_TAG = {"_foreach_copy", "_foreach_copy_", "_foreach_zero", "_foreach_zero_"}


def _pointwise(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op`` on this rank's elements of every tensor."""
    like = _first_ragged((*args, *kwargs.values()))
    kwargs.pop("memory_format", None)  # an interval is 1-D
    locals_in = [_operand(op, arg, like) for arg in args]
    named = {name: _operand(op, arg, like) for name, arg in kwargs.items()}
    result = op(*locals_in, **named)
    if not isinstance(result, Tensor):
        raise _refusal(op, args, kwargs)
    for arg, local in zip((*args, *kwargs.values()), (*locals_in, *named.values()), strict=True):
        if local is result:
            return arg  # ``op`` wrote to ``arg`` in place
    return _dtensor.dtensor_like(like, result)


def _on_lists(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op`` on lists of tensors, each cut like the tensor at its index in the first list.

    Tensors of other forms may be among them, such as parameters that a call ignored.
    """
    shown = next(arg for arg in (*args, *kwargs.values()) if _is_tensors(arg))
    result = op(
        *(_operands(op, arg, shown) for arg in args),
        **{name: _operands(op, arg, shown) for name, arg in kwargs.items()},
    )
    if result is None:
        return None
    return list(map(shown_like, shown, result))


def _operands(op: Any, arg: Any, shown: Sequence[Tensor]) -> Any:
    if _is_tensors(arg):
        return [_operand(op, one, like) for one, like in zip(arg, shown, strict=True)]
    return _dtensor.local_of(arg) if isinstance(arg, DTensor) and arg.dim() == 0 else arg


def _is_tensors(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and bool(arg) and isinstance(arg[0], Tensor)


# operations on one tensor


def _copy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy to a RaggedTensor from an equal cut or a full tensor, or from one to any tensor."""
    target, source = args[0], args[1]
    if isinstance(target, DTensor) and not is_ragged(target):
        target.copy_(source.redistribute(target.device_mesh, target.placements))
    elif not is_ragged(target):
        target.copy_(source.full_tensor())
    elif isinstance(source, DTensor):
        if not is_ragged(source):
            source = source.full_tensor()
            return _copy(op, (target, source, *args[2:]), kwargs)
        part, cut = _operand(op, source, target), cut_of(target)
        if tuple(part.shape) == cut.region.grid:  # from code that ignores the placement: peft
            part = cut.own_part(part)
        _dtensor.local_of(target).copy_(part, *args[2:], **kwargs)
    else:
        part = part_like(source.expand(target.shape), target, op)
        _dtensor.local_of(target).copy_(part, *args[2:], **kwargs)
    return target


def _made_like(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``zeros_like`` and similar operations: the cut stays, dtype and device may change."""
    kwargs.pop("memory_format", None)
    return _dtensor.dtensor_like(args[0], op(_dtensor.local_of(args[0]), *args[1:], **kwargs))


def _new(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``x.new_empty(x.shape)``, which PyTorch's ``async_save`` asks for, on this rank's cut."""
    like, shape, *rest = args
    if rest or tuple(shape) != tuple(like.shape):
        raise _refusal(op, args, kwargs)
    local = _dtensor.local_of(like)
    return _dtensor.dtensor_like(like, op(local, local.shape, **kwargs))


def _masked_put(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``x[mask] = value``, which is pointwise if the mask is cut like ``x``."""
    target, indices, value, *accumulate = args
    mask: Any = indices[0] if len(indices) == 1 else None
    if not is_ragged(mask) or mask.dtype is not torch.bool or value.dim() or any(accumulate):
        raise _refusal(op, args, kwargs)
    _dtensor.local_of(target).masked_fill_(_operand(op, mask, target), value)
    return target


def _in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    op(_dtensor.local_of(args[0]), *args[1:], **kwargs)
    return args[0]


def _same_shape(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``view`` and similar operations, only to the shape that the tensor already has."""
    if tuple(args[1]) != tuple(args[0].shape):
        raise _refusal(op, args, kwargs)
    return _dtensor.dtensor_like(args[0], _dtensor.local_of(args[0]).detach())


def _drawn_in_full(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the full tensor and keep the interval, for the values of the unsharded model."""
    return RANDOM_HANDLERS[op](op, args[0], args, kwargs)


# operations over all elements


def _sharding_of(tensor: Tensor) -> Sharding:
    """Return the spread of ``tensor``, where a plain tensor is the same on all ranks."""
    if not isinstance(tensor, DTensor):
        return Sharding((), 1)
    return sharding_of(tensor.device_mesh, tensor.placements)


def _sum(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    total, dtype = _wide_sum(args[0], kwargs)
    return total.to(dtype)


def _mean(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    total, dtype = _wide_sum(args[0], kwargs)
    if not (dtype.is_floating_point or dtype.is_complex):
        raise _refusal(op, args, kwargs)
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
    return _sharding_of(shown).total(local.sum(dtype=wide)), dtype


def _extreme(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the ``max`` or ``min`` of all elements; NaN if any element is NaN, as in torch."""
    local = _dtensor.local_of(args[0])
    if not args[0].numel() or not local.dtype.is_floating_point:
        raise _refusal(op, args, kwargs)
    sign = 1 if op is aten.max.default else -1
    own = local.mul(sign).max() if local.numel() else local.new_tensor(-math.inf)
    return _sharding_of(args[0]).largest(own) * sign


def _any(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found = _dtensor.local_of(args[0]).any().to(torch.int32)
    return _sharding_of(args[0]).largest(found).bool()


def _all(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    missed = _dtensor.local_of(args[0]).all().logical_not().to(torch.int32)
    return _sharding_of(args[0]).largest(missed).logical_not()


def _equal(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    one, other = args
    if one.shape != other.shape:
        return False
    like = _first_ragged(args)
    here = torch.equal(_operand(op, one, like), _operand(op, other, like))
    differs = torch.tensor(int(not here), device=_dtensor.local_of(like).device)
    return not _sharding_of(like).largest(differs).item()


def _vector_norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run ``linalg.vector_norm(x, ord, dim, keepdim)`` over all elements."""
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


def _norms(shown: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the norms of full tensors; those of equal spread share one all-reduce per group."""
    if order <= 0:
        raise RaggedOperationError(f"norm of order {order} of a RaggedTensor: expected one above 0")
    alike: dict[Sharding, list[int]] = {}
    for number, one in enumerate(shown):
        alike.setdefault(_sharding_of(one), []).append(number)
    norms: dict[int, Tensor] = {}
    for sharding, numbers in alike.items():
        parts = [_local_norm(local_part(shown[number]), order, dtype) for number in numbers]
        for number, norm in zip(numbers, _joined(parts, order, sharding), strict=True):
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


def _joined(parts: Sequence[Tensor], order: float, sharding: Sharding) -> tuple[Tensor, ...]:
    """Combine the norms of the ranks' parts into norms of full tensors."""
    stacked = torch.stack(list(parts))
    if math.isinf(order):
        return sharding.largest(stacked).unbind()
    return sharding.total(stacked.pow(order)).pow(1.0 / order).unbind()


def _unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients for a GradScaler; an infinity on one rank counts for all ranks."""
    grads, found_inf, inverse_scale = args
    op(list(map(local_part, grads)), found_inf, inverse_scale)
    groups = dict.fromkeys(group for grad in grads for group in _sharding_of(grad).groups)
    found_inf.copy_(Sharding(tuple(groups), 1).largest(found_inf))


_WHOLE_HANDLERS: dict[Any, Handler] = {
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


# operands


def _first_ragged(values: Iterable[Any]) -> DTensor:
    """Return the first RaggedTensor among ``values``."""
    found: DTensor = next(value for value in values if is_ragged(value))
    return found


def _operand(op: Any, arg: Any, like: Tensor) -> Any:
    """Return the local operand for ``arg`` that goes with this rank's elements of ``like``.

    A plain ``like`` goes with plain tensors of any shape.

    Raises:
        RaggedOperationError: if ``arg`` is a tensor with dims that is not cut like ``like``.
    """
    if fits(arg, like):
        return local_part(arg)
    raise RaggedOperationError(
        f"{op}: got {_described(arg)} beside {_described(like)}; expected a tensor cut into the "
        "same intervals on the same mesh, or one without dims. Bring both to one form first, such "
        "as by redistribute() or full_tensor()"
    )


def _described(tensor: Tensor) -> str:
    kind = f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}"
    if not isinstance(tensor, DTensor):
        return kind
    placements = ", ".join(map(repr, tensor.placements))
    return f"{kind} placed as ({placements}) on a mesh of shape {tuple(tensor.device_mesh.shape)}"


def _refusal(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedOperationError:
    """Return the error for an operation whose meaning changes on intervals."""
    found = (value for value in (*args, *kwargs.values()) if is_ragged(value))
    shapes = ", ".join(str(tuple(value.shape)) for value in found) or "a list of tensors"
    return RaggedOperationError(
        f"{op} on RaggedTensor {shapes}: a rank holds an interval of the flattened tensor, which "
        "has no rows, columns or single elements. Call full_tensor() first, work inside of "
        "unshard_params(), or shard with layout=PerParameter(), whose DTensors know matrices; "
        "optimizers must be element-wise, such as AdamW. If a forward did this, it was "
        "not that of the module given to fully_shard, which unshards it"
    )


_HANDLERS: dict[Any, Handler] = {
    **_WHOLE_HANDLERS,
    aten.copy_.default: _copy,
    aten.index_put_.default: _masked_put,
    aten.new_empty.default: _new,
    # pointwise, but not all have the tag; since PyTorch 2.15 ``x[mask] = value`` is one of these
    **dict.fromkeys(
        aten_ops("masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar masked_fill_.Tensor"),
        _pointwise,
    ),
    **dict.fromkeys(
        aten_ops(
            "detach.default alias.default _to_copy.default clone.default empty_like.default"
            " zeros_like.default ones_like.default full_like.default"
        ),
        _made_like,
    ),
    **dict.fromkeys(aten_ops("fill_.Scalar fill_.Tensor zero_.default"), _in_place),
    **dict.fromkeys(aten_ops("view.default _unsafe_view.default"), _same_shape),
    **dict.fromkeys((*RANDOM_FILLS, *RANDOM_LIKE), _drawn_in_full),
}
