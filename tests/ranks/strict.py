"""The strict mode around every job on ranks: it fails a backward that reads freed memory.

The engine frees and restores the memory of parameters, which allows a mistake that autograd cannot
see: a unit is resharded too early, and a backward reads freed memory. The process then crashes or,
worse, computes wrong gradients. In strict mode, each tensor that autograd saves is checked when it
is saved and again when it is read. A test that fails names the tensor's shape.
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
    """A saved tensor: an alias, because a saved output would keep its own graph alive."""

    alias: Tensor
    version: int


@contextmanager
def strict() -> Iterator[None]:
    """Check every saved tensor in the block; workers enter this mode around each job.

    Autograd calls only the innermost pair of hooks, so the hooks of an activation checkpoint would
    hide its recomputed tensors. Therefore every pair of hooks also checks, in this mode.
    ``torch.func`` refuses to work under saved-tensor hooks of any kind.
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
    """Leave the strict mode, where a test counts compiled graphs: Dynamo would trace the hooks."""
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
    """Return the alias; check for in-place changes, which autograd does not do under hooks."""
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
    """Raise AssertionError if the storage of ``tensor`` is too small for its elements."""
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
    """Return the size of a storage; 0 if the engine has freed it and made it refuse reads."""
    try:
        storage.data_ptr()
    except RuntimeError as error:
        if "while the unit is resharded" in str(error):
            return 0
    return storage.nbytes()
