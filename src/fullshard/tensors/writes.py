"""Writes to sharded tensors that PyTorch refuses, or applies to this rank's part alone.

Initializers of modules consist of such writes: ``eye_``, ``orthogonal_``, ``sparse_``, and copies
of values that were computed as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from fullshard import _torch
from fullshard.tensors.own_parts import gathered, is_partial, keep_own_part

aten = torch.ops.aten


def _copy(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Copy this rank's part of a whole tensor, plain or replicated."""
    source = args[1]
    if isinstance(source, DTensor):
        if is_partial(target) or not all(one.is_replicate() for one in source.placements):
            return _torch.default_dtensor_op(op, args, kwargs)
        source = _torch.local_of(source)
    return keep_own_part(op, source.expand(target.shape), target)


def _fill_with(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    op(_torch.local_of(target), gathered(args[1]))
    return target


def _on_whole(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Change the gathered tensor and keep this rank's part."""
    whole, *others = tree_map(gathered, args)
    op(whole, *others, **tree_map(gathered, kwargs))
    return keep_own_part(op, whole, target)


def _compute(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Overwrite ``out`` with a result that every rank can compute as a whole."""
    whole = torch.empty(target.shape, dtype=target.dtype, device=_torch.local_of(target).device)
    op(*args, **{**kwargs, "out": whole})
    return keep_own_part(op, whole, target)


def _transpose(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return _torch.transposed_in_place(target)


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
