"""A second device in PyTorch for CPUs, for which autograd has a queue and a thread of its own.

Its tensors wrap tensors of the CPU. A process that called ``bring`` has the device for
good, so programs that need it run in processes of their own (``tests/lanes/queues.py``). An
exception in the device's thread ends the process, with or without fullshard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

AWAY = "away"


class _Away(Tensor):
    """A tensor of the device, which computes with ``inner``."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Away:
        made: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=f"{AWAY}:0"
        )
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = args, dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        is_leaving = device is not None and torch.device(device).type == "cpu"
        inner_args, inner_kwargs = tree.tree_map_only(_Away, lambda t: t.inner, (args, kwargs))
        result = op(*inner_args, **inner_kwargs)
        if op is torch.ops.aten.copy_.default:
            return args[0]
        return result if is_leaving else tree.tree_map_only(Tensor, _Away, result)


_library: list[torch.library.Library] = []  # for as long as the process lives


def bring() -> None:
    """Make the device known to this process."""
    _setup_privateuseone_for_python_backend(AWAY)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    _library.append(library)


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return _Away(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return _Away(torch.empty_strided(size, stride, dtype=dtype))
