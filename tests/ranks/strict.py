"""The strict mode that every job on ranks runs in: no backward reads freed memory unnoticed.

Parameters whose memory comes and goes make one mistake possible that autograd cannot see: a unit
resharded too early, and a backward that reads what is left. That kills the process or, worse, gives
wrong gradients. Here each tensor that autograd saves is looked at when it is saved and when it is
read, and the test fails with its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

__all__ = ["check_memory", "left", "size_in_use", "strict"]


class _Saved(NamedTuple):
    """What autograd keeps of a tensor: an alias, because an output would hold its own graph."""

    alias: Tensor
    version: int


@contextmanager
def strict() -> Iterator[None]:
    """What a worker enters around each job.

    Only the innermost pair of hooks is ever called, so an activation checkpoint's own hooks would
    hide what it recomputes: while this lasts, every pair is made to check. ``torch.func`` refuses
    to work under saved-tensor hooks of any kind.
    """
    plain = saved_tensors_hooks.__init__

    @wraps(plain)
    def checking(self: Any, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        plain(self, _checked_before(pack), _checked_after(unpack))

    saved_tensors_hooks.__init__ = checking  # type: ignore[method-assign]
    try:
        with saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        saved_tensors_hooks.__init__ = plain  # type: ignore[method-assign]


@contextmanager
def left() -> Iterator[None]:
    """Leave the strict mode, where compiled graphs are counted: Dynamo would trace its hooks."""
    checking = saved_tensors_hooks.__init__
    torch._C._autograd._pop_saved_tensors_default_hooks()
    saved_tensors_hooks.__init__ = checking.__wrapped__  # type: ignore[method-assign,attr-defined]
    try:
        yield
    finally:
        saved_tensors_hooks.__init__ = checking  # type: ignore[method-assign]
        torch._C._autograd._push_saved_tensors_default_hooks(_pack, _unpack)


def _pack(tensor: Tensor) -> _Saved:
    return _Saved(tensor.detach(), tensor._version)


def _unpack(saved: _Saved) -> Tensor:
    """The alias; autograd leaves the check for in-place changes to whoever sets hooks."""
    if saved.alias._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: shape {tuple(saved.alias.shape)} is at version {saved.alias._version}; "
            f"expected version {saved.version}"
        )
    return saved.alias


def _checked_before(pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def checking(tensor: Tensor) -> Any:
        check_memory(tensor, "saved")
        return pack(tensor)

    return checking


def _checked_after(unpack: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    def checking(packed: Any) -> Tensor:
        tensor = unpack(packed)
        check_memory(tensor, "read")
        return tensor

    return checking


def check_memory(tensor: Tensor, done: str) -> None:
    """Raise AssertionError if ``tensor`` has elements and its storage no room for them."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_meta:
        return
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    held = size_in_use(tensor.untyped_storage())
    if held < needed:
        raise AssertionError(
            f"a tensor of shape {tuple(tensor.shape)} was {done} for backward while its memory is "
            f"freed: it needs {needed} bytes, its storage has {held}"
        )


def size_in_use(storage: torch.UntypedStorage) -> int:
    """The size of a storage; 0 if the engine makes it refuse reads, since its memory is freed."""
    try:
        storage.data_ptr()
    except RuntimeError as error:
        if "while the unit is resharded" in str(error):
            return 0
    return storage.nbytes()
