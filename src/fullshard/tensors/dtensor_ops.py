"""Replace some of PyTorch's operations on DTensors, for the meshes of fullshard.

PyTorch calls the handler of an operation before anything else and for every DTensor. So handlers
return calls on DTensors of other meshes, or on ``meta``, to PyTorch. Some of the operations are
writes that PyTorch refuses, or applies to the local shard alone. Initializers of modules need such
writes: ``eye_``, ``orthogonal_``, ``sparse_``, and copies of values that were computed in full.

For a DTensor that is cut into rows, PyTorch returns ``w[i]`` as a copy of that row on every rank.
Writes to the copy are silently lost, such as ``w[padding_idx].fill_(0)``, by which ``nn.Embedding``
clears its padding row. Here ``w[i]`` is a ``GatheredView``, which passes writes on to the parts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from fullshard._torch import dtensor as _dtensor
from fullshard._torch import memory as _memory
from fullshard.errors import UnsupportedError
from fullshard.tensors.parts import (
    aten_ops,
    gathered,
    is_partial,
    keep_own_part,
    part_like,
    replicated,
)
from fullshard.tensors.pointwise import MIXED_LIST_HANDLERS, POINTWISE_HANDLERS
from fullshard.tensors.random import RANDOM_FILLS, RANDOM_HANDLERS

aten = torch.ops.aten


def _copy(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Copy this rank's part of a full tensor, plain or replicated."""
    source = args[1]
    if is_partial(target):
        return _dtensor.default_dtensor_op(op, args, kwargs)
    if isinstance(source, DTensor):
        if not all(one.is_replicate() for one in source.placements):
            return _dtensor.default_dtensor_op(op, args, kwargs)
        source = _dtensor.local_of(source)
    return keep_own_part(op, source.expand(target.shape), target)


def _fill_with(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    if is_partial(target):
        return _dtensor.default_dtensor_op(op, args, kwargs)
    op(_dtensor.local_of(target), gathered(args[1]))
    return target


def _on_full(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Change the gathered tensor and keep this rank's part."""
    if is_partial(target):
        return _dtensor.default_dtensor_op(op, args, kwargs)
    full, *others = tree_map(gathered, args)
    op(full, *others, **tree_map(gathered, kwargs))
    return keep_own_part(op, full, target)


def _compute(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Overwrite ``out`` with a result that every rank can compute in full."""
    if is_partial(target):
        return _dtensor.default_dtensor_op(op, args, kwargs)
    full = torch.empty(target.shape, dtype=target.dtype, device=_dtensor.local_of(target).device)
    op(*args, **{**kwargs, "out": full})
    return keep_own_part(op, full, target)


def _transpose(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return _dtensor.transposed_in_place(target)


WRITE_HANDLERS = {
    aten.copy_.default: _copy,
    aten.fill_.Tensor: _fill_with,
    aten.index_put_.default: _on_full,
    aten.index_fill_.int_Scalar: _on_full,
    aten.index_fill_.int_Tensor: _on_full,
    aten.eye.m_out: _compute,
    aten.eye.out: _compute,
    aten.t_.default: _transpose,
}


class _Origin(NamedTuple):
    """The tensor behind a view.

    Attributes:
        parts: the sharded DTensor.
        full: the full tensor, as it was when the view was made or last written to. Views use
            the memory of ``full``.
    """

    parts: DTensor
    full: Tensor


class GatheredView(_dtensor.OwnDispatch):
    """A view of a sharded DTensor that was gathered for the view; all ranks must use it alike.

    Operations that write to the view also write to the sharded tensor, but only to elements in the
    view. Other writes to the sharded tensor do not change the view: take another view.
    """

    origin: _Origin

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = list(_written(op, args, kwargs))
        if written:
            return _write(op, written, args, kwargs)
        result = op(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        if not (op._schema.arguments[0].alias_info and isinstance(args[0], GatheredView)):
            return result
        origin = args[0].origin
        return tree_map(lambda view: _view_of(origin, view, op), result)

    # A copy, in memory or on disk, is an ordinary DTensor and not a view.

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        return copy.deepcopy(_plain(self), memo)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def _plain(value: Any) -> Any:
    """Return a GatheredView as an ordinary DTensor over its memory, other values unchanged."""
    return _dtensor.dtensor_as(value, DTensor) if isinstance(value, GatheredView) else value


def _view_of(origin: _Origin, value: Any, op: Any) -> Any:
    """Return ``value``, as a GatheredView if it is a DTensor in the memory of ``origin``."""
    if not isinstance(value, DTensor):
        return value
    local, memory = _dtensor.local_of(value), origin.full
    if not _is_around(memory, value):
        return value
    if local.dtype != memory.dtype:
        raise UnsupportedError(
            f"{op}: got a view as {local.dtype} of a sharded tensor of {memory.dtype}; "
            "write to it inside of unshard_params(), or read it from full_tensor()"
        )
    view = _dtensor.dtensor_as(value, GatheredView)
    view.origin = origin
    return view


def _is_around(memory: Tensor, view: DTensor) -> bool:
    return _memory.shares_storage(_dtensor.local_of(view), memory)


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[GatheredView]:
    """Yield each argument that ``op`` writes to and that is a GatheredView."""
    for number, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, GatheredView):
                yield one


def _write(
    op: Any, written: list[GatheredView], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``op`` on the gathered memory, then write the changes to the sharded tensors."""
    if op not in _OVERWRITES:
        for parts, memory in (view.origin for view in written):
            memory.copy_(gathered(parts))
    shown = {id(view): _plain(view) for view in written}

    def plain(value: Any) -> Any:
        return shown.get(id(value), _plain(value))

    result = op(*tree_map(plain, args), **tree_map(plain, kwargs))
    for view in written:
        _write_back(op, view)
    views = {id(shown[id(view)]): view for view in written}
    return tree_map(lambda value: views.get(id(value), value), result)


def _write_back(op: Any, view: GatheredView) -> None:
    parts, memory = view.origin
    local = _dtensor.local_of(view)
    is_written = torch.empty_strided(
        memory.shape, memory.stride(), dtype=torch.bool, device=memory.device
    ).zero_()
    start = local.storage_offset() - memory.storage_offset()
    is_written.as_strided(local.shape, local.stride(), start).fill_(True)
    own, is_own = part_like(memory, parts, op), part_like(is_written, parts, op)
    target = _dtensor.local_of(parts)
    target.copy_(torch.where(is_own, own, target))


_OVERWRITES = {
    *RANDOM_FILLS,
    *aten_ops("fill_.Scalar fill_.Tensor zero_.default copy_.default"),
}
"""Operations that do not read the tensor they write to, so the tensor need not be up to date."""


# operations that make views, and the tensor dims that each operation selects along


def _viewed(dims_of: Callable[..., tuple[int, ...]]) -> Any:
    def view(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if is_partial(target) or _is_computed(target):
            return _dtensor.default_dtensor_op(op, args, kwargs)
        looked_along = {dim % target.dim() for dim in dims_of(*args, **kwargs)}
        if looked_along.isdisjoint(map(_dtensor.sharded_dim, target.placements)):
            views = _dtensor.default_dtensor_op(op, args, kwargs)
            if all(_is_around(_dtensor.local_of(target), one) for one in tree_leaves(views)):
                return views
            # PyTorch gathers tensors with fewer rows than there are ranks, whatever the dim is.
        origin = _Origin(target, _full_of(target))
        found = op(replicated(origin.full, target.device_mesh), *args[1:], **kwargs)
        return tree_map(lambda value: _view_of(origin, value, op), found)

    return view


def _full_of(tensor: DTensor) -> Tensor:
    """Gather ``tensor`` and keep its strides, on which the order of random numbers depends."""
    full: Tensor = gathered(tensor)
    if full.stride() == tensor.stride():
        return full
    strided = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=full.dtype, device=full.device
    )
    return strided.copy_(full)


def _is_computed(tensor: DTensor) -> bool:
    """Return whether ``tensor`` was computed under autograd: no leaf, and no view of a leaf."""
    base = tensor._base if tensor._is_view() else None
    return not (tensor.is_leaf or (base is not None and base.is_leaf))


def _of_slice(
    tensor: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[int, ...]:
    """Return the sliced dim, or no dim for a full slice, which needs nothing from other ranks."""
    size = tensor.shape[dim]
    return () if range(size)[start:end:step] == range(size) else (dim,)


_VIEW_HANDLERS = {
    aten.select.int: _viewed(lambda _, dim, index: (dim,)),
    aten.slice.Tensor: _viewed(_of_slice),
    aten.split.Tensor: _viewed(lambda _, size, dim=0: (dim,)),
    aten.split_with_sizes.default: _viewed(lambda _, sizes, dim=0: (dim,)),
    aten.unbind.int: _viewed(lambda _, dim=0: (dim,)),
    aten.diagonal.default: _viewed(lambda tensor, *_, **__: tuple(range(tensor.dim()))),
}


Handler = Callable[[Any, DTensor, tuple[Any, ...], dict[str, Any]], object]
"""A function of the operation, its target DTensor, and all positional and named arguments."""

_HANDLERS: dict[Any, Handler] = {
    **POINTWISE_HANDLERS,
    **RANDOM_HANDLERS,
    **_VIEW_HANDLERS,
    **WRITE_HANDLERS,
}
_meshes: set[int] = set()
"""Hashes of the meshes with our operations.

They stay when a mesh is freed, because an equal mesh may still be in use.
"""


def handle_ops_on(mesh: DeviceMesh) -> None:
    """Make fills of and writes to DTensors on ``mesh`` work as on the unsharded tensor.

    ``mesh`` may have any dims. All ranks must have the same seed, tensor-parallel ranks included.
    """
    if not _meshes:
        for op in _HANDLERS:
            _dtensor.handle_dtensor_op(op, _dispatch)
    _meshes.add(hash(mesh))


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
    if hash(mesh) not in _meshes or mesh.get_coordinate() is None:
        return False
    return not (tensor.is_meta or _memory.is_fake(_dtensor.local_of(tensor)))
