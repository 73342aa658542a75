"""Replace some of PyTorch's operations on DTensors, for the meshes of fullshard.

PyTorch calls the handler of an operation before anything else and for every DTensor. So handlers
return calls on DTensors of other meshes, or on ``meta``, to PyTorch. Some of the operations are
writes that PyTorch refuses, or applies to the local shard alone. Initializers of modules need such
writes: ``eye_``, ``orthogonal_``, ``sparse_``, and copies of values that were computed in full.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from fullshard._torch import dtensor as _dtensor
from fullshard._torch import memory as _memory
from fullshard.tensors.gathered_view import VIEW_HANDLERS
from fullshard.tensors.own_parts import gathered, is_partial, keep_own_part
from fullshard.tensors.pointwise import MIXED_LIST_HANDLERS, POINTWISE_HANDLERS
from fullshard.tensors.random import RANDOM_HANDLERS

aten = torch.ops.aten


def _copy(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Copy this rank's part of a full tensor, plain or replicated."""
    source = args[1]
    if isinstance(source, DTensor):
        if is_partial(target) or not all(one.is_replicate() for one in source.placements):
            return _dtensor.default_dtensor_op(op, args, kwargs)
        source = _dtensor.local_of(source)
    return keep_own_part(op, source.expand(target.shape), target)


def _fill_with(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    op(_dtensor.local_of(target), gathered(args[1]))
    return target


def _on_whole(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Change the gathered tensor and keep this rank's part."""
    whole, *others = tree_map(gathered, args)
    op(whole, *others, **tree_map(gathered, kwargs))
    return keep_own_part(op, whole, target)


def _compute(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Overwrite ``out`` with a result that every rank can compute in full."""
    whole = torch.empty(target.shape, dtype=target.dtype, device=_dtensor.local_of(target).device)
    op(*args, **{**kwargs, "out": whole})
    return keep_own_part(op, whole, target)


def _transpose(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return _dtensor.transposed_in_place(target)


WRITE_HANDLERS = {
    aten.copy_.default: _copy,
    aten.fill_.Tensor: _fill_with,
    aten.index_put_.default: _on_whole,
    aten.index_fill_.int_Scalar: _on_whole,
    aten.index_fill_.int_Tensor: _on_whole,
    aten.eye.m_out: _compute,
    aten.eye.out: _compute,
    aten.t_.default: _transpose,
}


Handler = Callable[[Any, DTensor, tuple[Any, ...], dict[str, Any]], object]
"""A function of the operation, its target DTensor, and all positional and named arguments."""

_HANDLERS: dict[Any, Handler] = {
    **POINTWISE_HANDLERS,
    **RANDOM_HANDLERS,
    **VIEW_HANDLERS,
    **WRITE_HANDLERS,
}
_meshes: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()


def handle_ops_on(mesh: DeviceMesh) -> None:
    """Make fills of and writes to DTensors on ``mesh`` work as on the unsharded tensor.

    ``mesh`` may have any dims. All ranks must have the same seed, tensor-parallel ranks included.
    """
    if not _meshes:
        for op in _HANDLERS:
            _dtensor.handle_dtensor_op(op, _dispatch)
    _meshes.add(mesh)


def handle_mixed_lists() -> None:
    """Make ``foreach`` optimizers step lists of DTensors on several meshes and of plain tensors.

    Call this when such an optimizer is met: other lists take longer afterwards.
    """
    for op in MIXED_LIST_HANDLERS.keys() - _HANDLERS.keys():
        _HANDLERS[op] = MIXED_LIST_HANDLERS[op]
        _dtensor.handle_dtensor_op(op, _dispatch)


def _dispatch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    target = kwargs.get("out", args[0])
    if isinstance(target, (list, tuple)):
        target = next((one for one in target if isinstance(one, DTensor)), None)
    if not isinstance(target, DTensor) or not _is_ours(target):
        return _dtensor.default_dtensor_op(op, args, kwargs)
    return _HANDLERS[op](op, target, args, kwargs)


def _is_ours(tensor: DTensor) -> bool:
    mesh = tensor.device_mesh
    if mesh not in _meshes or mesh.get_coordinate() is None:
        return False
    return not (tensor.is_meta or _memory.is_fake(_dtensor.local_of(tensor)))
