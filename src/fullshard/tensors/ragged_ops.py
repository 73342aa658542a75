"""Operations that RaggedTensors support: those with the same meaning on intervals.

    pointwise       run on this rank's interval; plain tensors without dims are equal on all ranks.
    tensor lists    foreach and fused operations of optimizers, run tensor by tensor.
    whole           sums, norms and similar operations over all elements, see ``ragged_whole.py``.
    random fills    draw the full tensor and keep the interval, so that cuts do not matter.

All other operations are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard._torch import dtensor as _dtensor
from fullshard.tensors.own_parts import part_like
from fullshard.tensors.ragged_cut import cut_of, is_ragged
from fullshard.tensors.ragged_operands import Handler, first_ragged, operand, refusal
from fullshard.tensors.ragged_whole import WHOLE_HANDLERS
from fullshard.tensors.random import RANDOM_FILLS, RANDOM_HANDLERS, RANDOM_LIKE

aten = torch.ops.aten


def run_on_intervals(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op``, which has a RaggedTensor among its arguments.

    Raises:
        RaggedOperationError: if ``op`` has another meaning on intervals.
    """
    handler = _handler_of(op)
    if handler is None:
        raise refusal(op, args, kwargs)
    return handler(op, args, kwargs)


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
    like = first_ragged((*args, *kwargs.values()))
    kwargs.pop("memory_format", None)  # an interval is 1-D
    locals_in = [operand(op, arg, like) for arg in args]
    named = {name: operand(op, arg, like) for name, arg in kwargs.items()}
    result = op(*locals_in, **named)
    if not isinstance(result, Tensor):
        raise refusal(op, args, kwargs)
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
    return [
        _dtensor.dtensor_like(one, local) if isinstance(one, DTensor) else local
        for one, local in zip(shown, result, strict=True)
    ]


def _operands(op: Any, arg: Any, shown: Sequence[Tensor]) -> Any:
    if _is_tensors(arg):
        return [operand(op, one, like) for one, like in zip(arg, shown, strict=True)]
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
        part, cut = operand(op, source, target), cut_of(target)
        if tuple(part.shape) == cut.tp_shape:  # from code that ignores the placement: peft
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
        raise refusal(op, args, kwargs)
    local = _dtensor.local_of(like)
    return _dtensor.dtensor_like(like, op(local, local.shape, **kwargs))


def _masked_put(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``x[mask] = value``, which is pointwise if the mask is cut like ``x``."""
    target, indices, value, *accumulate = args
    mask: Any = indices[0] if len(indices) == 1 else None
    if not is_ragged(mask) or mask.dtype is not torch.bool or value.dim() or any(accumulate):
        raise refusal(op, args, kwargs)
    _dtensor.local_of(target).masked_fill_(operand(op, mask, target), value)
    return target


def _in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    op(_dtensor.local_of(args[0]), *args[1:], **kwargs)
    return args[0]


def _same_shape(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``view`` and similar operations, only to the shape that the tensor already has."""
    if tuple(args[1]) != tuple(args[0].shape):
        raise refusal(op, args, kwargs)
    return _dtensor.dtensor_like(args[0], _dtensor.local_of(args[0]).detach())


def _drawn_in_full(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the full tensor and keep the interval, for the values of the unsharded model."""
    return RANDOM_HANDLERS[op](op, args[0], args, kwargs)


_HANDLERS: dict[Any, Handler] = {
    **WHOLE_HANDLERS,
    aten.copy_.default: _copy,
    aten.index_put_.default: _masked_put,
    aten.new_empty.default: _new,
    # pointwise, but not all have the tag; since PyTorch 2.15 ``x[mask] = value`` is one of these
    **dict.fromkeys(
        (
            aten.masked_fill.Scalar,
            aten.masked_fill.Tensor,
            aten.masked_fill_.Scalar,
            aten.masked_fill_.Tensor,
        ),
        _pointwise,
    ),
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
    **dict.fromkeys((*RANDOM_FILLS, *RANDOM_LIKE), _drawn_in_full),
}
