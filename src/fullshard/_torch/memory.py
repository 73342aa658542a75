"""Memory of tensors: storages and their owners, parts of them, and tensors without memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from math import prod
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from fullshard._torch.names import VERSION, Private

private = Private(__name__, "training")

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

no_dispatch = private.get("torch.utils._mode_utils.no_dispatch", "`fullshard.plan`")
"""A context in which operations reach neither modes nor subclasses."""
_FAKES = "models under a `FakeTensorMode`"
_FakeTensor = private.get("torch._subclasses.fake_tensor.FakeTensor", _FAKES, instead=())
_WRAPPERS = "optimizer state of tensor subclasses"
is_wrapper_subclass = private.get(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass", _WRAPPERS
)
"""Return whether a tensor has ``__tensor_flatten__``, which names the tensors inside."""


def _ever_new(_: object) -> int:
    """Return a number that is never equal to one before, as if something held the tensor."""
    return time.perf_counter_ns()


_REUSED = "gradients whose memory the next step reuses"
Count = Callable[[Any], int]
_num_uses: Count = private.get("torch.Tensor._use_count", _REUSED, instead=_ever_new)
_num_owners: Count = private.get("torch._C._storage_Use_Count", _REUSED, instead=_ever_new)


READS = "errors in place of crashes when freed parameters are read"
_refuse: Any = None
_allow: Any = None
_storage_at: Any = None
_swap: Any = None
if VERSION >= (2, 13) and torch.version.cuda:
    _refuse = private.get("torch._C._set_storage_data_ptr_access_error_msg", READS, instead=())
    _allow = private.get("torch._C._clear_storage_data_ptr_access_error_msg", READS, instead=())
    _storage_at = private.get("torch._C._construct_storage_from_data_pointer", READS, instead=())
    _swap = private.get("torch.UntypedStorage._swap_data_ptr_", READS, instead=())


def refuses_reads(device: torch.device) -> bool:
    """Return whether ``refuse_reads`` works on ``device``; only the CPU was tested."""
    return device.type == "cpu" and all((_refuse, _allow, _storage_at, _swap))


def refuse_reads(storage: torch.UntypedStorage, nbytes: int, text: str) -> None:
    """Make PyTorch raise a RuntimeError with ``text`` if anything reads the empty ``storage``.

    The storage gets the size ``nbytes`` without memory. With the size 0, an error of PyTorch about
    sizes would come before ``text`` when a view is made.
    """
    _swap(storage, _storage_at(0, storage.device, nbytes))
    _refuse(storage._cdata, text)


def allow_reads(storage: torch.UntypedStorage) -> None:
    """Undo ``refuse_reads``, so that ``storage`` is empty and can be resized."""
    _allow(storage._cdata)
    _swap(storage, torch.UntypedStorage(0))


def num_holders(tensors: list[Tensor]) -> int:
    """Return a count that is higher while other Python or C++ code holds any of ``tensors``."""
    return sum(map(sys.getrefcount, tensors)) + sum(map(_num_uses, tensors))


def num_owners(storages: Iterable[torch.UntypedStorage]) -> int:
    """Return how many tensors and other owners share ``storages``."""
    return sum(map(_num_owners, map(_cdata, storages)))


_cdata = attrgetter("_cdata")


def shares_storage(one: Tensor, other: Tensor) -> bool:
    """Return whether ``one`` and ``other`` are views of one storage."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def own_storage(view: Tensor) -> Tensor:
    """Return the memory of ``view`` as a tensor whose storage is just that part.

    Pickling a tensor saves its whole storage.
    """
    view = view.detach() if view.requires_grad else view
    return own_part(view, 0, view.shape, view.stride())


def own_part(
    flat: Tensor,
    start: int,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
    number: int | None = None,
) -> Tensor:
    """Return the elements of ``flat`` from index ``start``, with a storage of just that part.

    ``stride`` is None for a contiguous tensor. The memory is shared with ``flat``, except on meta,
    where no mode sees the part, since it counts as memory of ``flat`` there, too.

    The storage keeps ``flat`` alive, and has ``start`` and ``number`` for ``tensors/flats.py``. The
    Python object of a storage lives as long as the storage, and copies omit its attributes.
    """
    if flat.is_meta:
        with no_dispatch():
            part = flat.new_empty(shape)
        storage: Any = part.untyped_storage()
    else:
        length = prod(shape)
        if stride is not None and length:
            length = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        begin = (flat.storage_offset() + start) * flat.itemsize
        storage = flat.untyped_storage()[begin : begin + length * flat.itemsize]
        part = torch.empty(0, dtype=flat.dtype, device=flat.device)
        # Empty strides make the result contiguous, which torch's annotations do not say.
        part = part.set_(storage, 0, shape, () if stride is None else stride)
    storage.kept_alive, storage.start, storage.number = flat, start, number
    return part


def is_at(tensor: Tensor, other: Tensor) -> bool:
    """Return whether both tensors begin at the same place in memory, on the meta device as well."""
    if not tensor.is_meta:
        return tensor.data_ptr() == other.data_ptr()
    storages = tensor.untyped_storage()._cdata, other.untyped_storage()._cdata
    return len(set(storages)) == 1 and tensor.storage_offset() == other.storage_offset()


def whole_on_meta(tensor: Tensor) -> Tensor | None:
    """Return the tensor that ``tensor`` is an ``own_part`` of on the meta device, or None."""
    whole: Tensor | None = getattr(tensor.untyped_storage(), "kept_alive", None)
    return whole if tensor.is_meta else None


def wrapper_of(cls: type[AnyTensor], like: Tensor, device: torch.device | None = None) -> AnyTensor:
    """Return a tensor without memory, of a class that dispatches, with the metadata of ``like``."""
    shape, strides, device = like.shape, like.stride(), device or like.device
    made = Tensor._make_wrapper_subclass(
        cls, shape, strides=strides, dtype=like.dtype, device=device
    )
    return made


def make_param(tensor: Tensor) -> None:
    """Make ``isinstance`` accept ``tensor``, a tensor subclass, as an ``nn.Parameter``."""
    tensor._is_param = True


def is_fake(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a ``FakeTensor``, made under a ``FakeTensorMode``."""
    return isinstance(tensor, _FakeTensor)


private.attributes("torch.UntypedStorage", "_cdata")
private.attributes("torch.Tensor", "_make_wrapper_subclass", "parameters without memory")
