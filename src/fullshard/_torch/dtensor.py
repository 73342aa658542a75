"""DTensors: made without the checks and autograd of ``from_local``, and how operations find us."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard._torch.memory import no_dispatch, own_storage
from fullshard._torch.names import VERSION, Private

private = Private(__name__, "parameters as DTensors")

_TENSOR = "torch.distributed.tensor"
if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
else:
    DTensorSpec = private.get(f"{_TENSOR}._dtensor_spec.DTensorSpec")
    StridedShard = private.get(f"{_TENSOR}.placement_types._StridedShard", "FSDP of TP shards")
_TensorMeta = private.get(f"{_TENSOR}._dtensor_spec.TensorMeta")
_dispatcher = private.get(f"{_TENSOR}.DTensor._op_dispatcher")
_ASYNC = "torch.distributed._functional_collectives.AsyncCollectiveTensor"
_AsyncCollectiveTensor = private.get(_ASYNC, "results of functional collectives", instead=())

AnyDTensor = TypeVar("AnyDTensor", bound=DTensor)


class OwnDispatch(DTensor):
    """A base class for DTensor subclasses that define ``__torch_dispatch__`` themselves.

    Before 2.12, DTensor's dispatcher ignores that method (PyTorch issue 177716). There, calls from
    Python reach the class through ``__torch_function__``; calls from inside PyTorch, such as those
    of ``__setitem__``, through ``handle_dtensor_op``; calls from autograd do not reach the class.
    """


class _Asking(TorchDispatchMode):
    """A mode that passes each operation to the ``OwnDispatch`` class among its arguments."""

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for cls in types:
            if issubclass(cls, OwnDispatch):
                return cls.__torch_dispatch__(op, types, args, kwargs or {})
        return op(*args, **(kwargs or {}))


def _ask_by_function(
    cls: Any, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    with torch._C.DisableTorchFunctionSubclass(), _Asking():  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


if VERSION < (2, 12):
    OwnDispatch.__torch_function__ = classmethod(_ask_by_function)  # type: ignore[assignment]


def dtensor_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    *,
    shape: torch.Size,
    dtype: torch.dtype,
    stride: tuple[int, ...] | None = None,
) -> DTensorSpec:
    """Return the spec of a DTensor with this global shape and stride; None: contiguous."""
    stride = torch.empty(shape, device="meta").stride() if stride is None else stride
    return DTensorSpec(mesh, placements, _TensorMeta(shape, stride, dtype))


def dtensor_around(
    local: Tensor, spec: DTensorSpec, *, requires_grad: bool, cls: type[AnyDTensor]
) -> AnyDTensor:
    """Return a DTensor of class ``cls`` around ``local`` itself, without checks.

    The DTensor keeps the storage offset of ``local``, which compilers need. Unless that offset is
    0, PyTorch can neither copy nor pickle the DTensor.
    """
    return cls(local, spec, requires_grad=requires_grad)


def dtensor_from_spec(
    local: Tensor, spec: DTensorSpec, *, requires_grad: bool, cls: type[AnyDTensor]
) -> AnyDTensor:
    """Return a DTensor of class ``cls`` that shares the memory of ``local``, without checks.

    A plain ``local`` tensor with a storage offset is replaced by an ``own_storage`` view.
    """
    if local.storage_offset() and type(local) is Tensor:
        local = own_storage(local)
    return dtensor_around(local, spec, requires_grad=requires_grad, cls=cls)


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Return the spec of ``tensor``: mesh, placements, shape, stride and dtype."""
    return tensor._spec


def are_placed_alike(one: DTensor, other: DTensor) -> bool:
    """Return whether both have the same mesh, placements and shape."""
    a, b = one._spec, other._spec
    return a is b or (a.placements == b.placements and a.mesh == b.mesh and a.shape == b.shape)


def local_of(tensor: DTensor) -> Tensor:
    """Return the local tensor itself (``to_local`` makes a new view each time)."""
    return tensor._local_tensor


def locals_of(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield local tensors in one pass in C; a plain tensor raises ``AttributeError``."""
    return map(_local_tensor, tensors)


def locals_or_plain(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield local tensors, and plain tensors themselves, in one pass in C."""
    return map(getattr, tensors, repeat("_local_tensor"), tensors)


def share_specs(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether all are DTensors, each pair with the very same spec object.

    False does not mean that they are placed differently: see ``are_placed_alike``.
    """
    try:
        return all(map(is_, map(_spec, tensors), map(_spec, others)))
    except AttributeError:
        return False


_local_tensor = attrgetter("_local_tensor")
_spec = attrgetter("_spec")


def dtensor_like(tensor: DTensor, local: Tensor) -> DTensor:
    """Return ``local``, shaped like the local tensor of ``tensor``, as a DTensor placed like it."""
    spec = tensor._spec
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != local.dtype:
        meta = _TensorMeta(meta.shape, meta.stride, local.dtype)
        spec = replace(spec, tensor_meta=meta)
    return dtensor_from_spec(local, spec, requires_grad=False, cls=type(tensor))


def dtensor_as(tensor: DTensor, cls: type[AnyDTensor]) -> AnyDTensor:
    """Return a DTensor of class ``cls`` with the same local tensor, detached from autograd."""
    return dtensor_around(tensor._local_tensor, tensor._spec, requires_grad=False, cls=cls)


def repoint(tensor: DTensor, local: Tensor) -> None:
    """Replace the local tensor of ``tensor`` with another one of the same shape and dtype."""
    tensor._local_tensor = local


class _Seen(threading.local):
    """The handlers that the dispatcher uses in this thread; None means the shared handlers."""

    handlers: dict[Any, Any] | None = None


class _Dispatcher(type(_dispatcher)):  # type: ignore[misc]
    """DTensor's dispatcher, from which one thread can drop a handler that other threads keep."""

    @property
    def _custom_op_handlers(self) -> dict[Any, Any]:
        if _seen.handlers is not None:
            return _seen.handlers
        return cast("dict[Any, Any]", self.__dict__["_custom_op_handlers"])

    @_custom_op_handlers.setter
    def _custom_op_handlers(self, handlers: dict[Any, Any]) -> None:
        self.__dict__["_custom_op_handlers"] = handlers


_seen = _Seen()


def handle_dtensor_op(op: Any, handler: Any) -> None:
    """Make DTensor call ``handler(op, args, kwargs)`` for ``op``, whatever the arguments are."""
    _dispatcher.__class__ = _Dispatcher
    _dispatcher._custom_op_handlers[op] = _asking_own(handler) if VERSION < (2, 12) else handler


def _asking_own(handler: Any) -> Any:
    """Wrap ``handler``: subclasses of ``OwnDispatch`` run ``__torch_dispatch__`` instead."""

    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        cls = type(args[0])
        if issubclass(cls, OwnDispatch):
            return cast("Any", cls).__torch_dispatch__(op, (cls,), args, kwargs)
        return cast("object", handler(op, args, kwargs))

    return handle


def default_dtensor_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Run ``op`` as DTensor does without our handler, in this thread only."""
    before = _seen.handlers
    _seen.handlers = dict(_dispatcher._custom_op_handlers)
    _seen.handlers.pop(op, None)
    try:
        return cast("object", op(*args, **kwargs))
    finally:
        _seen.handlers = before


def surround_dtensor_op(op: Any, around: Any) -> Callable[[], None]:
    """Make DTensor call ``around(run, op, args, kwargs)`` for ``op``; return how to undo that.

    ``run(op, args, kwargs)`` runs ``op`` as before.
    """
    before = _dispatcher._custom_op_handlers.get(op)
    handle_dtensor_op(op, partial(around, before or default_dtensor_op))
    ours = _dispatcher._custom_op_handlers[op]

    def undo() -> None:
        handlers = _dispatcher._custom_op_handlers
        if handlers.get(op) is ours:
            if before is None:
                del handlers[op]
            else:
                handlers[op] = before

    return undo


def transposed_in_place(tensor: DTensor) -> DTensor:
    """Transpose ``tensor`` in place and return it, because DTensors have no ``t_()``."""
    new = cast("DTensor", tensor.detach().t())
    tensor._local_tensor, tensor._spec = new._local_tensor, new._spec
    with no_dispatch():  # update the shape that the object itself reports
        torch.ops.aten.t_.default(tensor)
    return tensor


def sharded_dim(placement: Placement) -> int | None:
    """Return the tensor dim that ``placement`` shards, strided or not; else None."""
    return placement.dim if isinstance(placement, (Shard, StridedShard)) else None


def is_sum(placement: Placement) -> bool:
    """Return whether the ranks hold the plain terms of a sum or a mean.

    Subclasses of ``Partial``, such as that of an embedding's output, mask or scale the terms.
    """
    return type(placement) is Partial and placement.reduce_op in ("sum", "avg")


def is_mean(placement: Placement) -> bool:
    """Return whether the ranks hold the plain terms of a mean."""
    return type(placement) is Partial and placement.reduce_op == "avg"


def waited(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or wait if a collective is still producing it and return the result."""
    if isinstance(tensor, _AsyncCollectiveTensor):
        return cast("Tensor", tensor.trigger_wait())
    return tensor


private.attributes(f"{_TENSOR}.DTensor", "_local_tensor _op_dispatcher._custom_op_handlers _spec")
