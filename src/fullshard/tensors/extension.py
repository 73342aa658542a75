"""Tensors that have a say in how they are gathered: ``fsdp_pre_all_gather`` and its other half.

A local tensor may have two methods, of its class or put on the object:

    fsdp_pre_all_gather(mesh)                                             -> (tensors, metadata)
    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, policy)   -> (tensors, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None)     -> (whole, to_free) | None
    fsdp_should_release_all_gather_outputs_after_post_all_gather()        -> bool

The first says what travels, any number of plain tensors of any dtypes; the second makes the whole
parameter of what all ranks sent, at first a new one, later in ``out``, which is the very tensor
that modules compute with. The third, which may be absent, says whether the parameter is in memory
of its own, so that what was gathered can be freed at once. It is the protocol of
``torch.distributed.fsdp.fully_shard``.

Where all ranks' parts are alike the first is called on the local tensor itself, else on one with
the padding that makes them so, so that hooks need not pad, and see no empty tensor; what is put on
either of the two is put on the other.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fullshard import _torch
from fullshard.errors import ExtensionError

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


@dataclass(frozen=True)
class HookArguments:
    """What hooks are told besides tensors."""

    mesh: DeviceMesh
    """1-D: the ranks that share a copy of the parameters."""
    modules: Sequence[weakref.ref[Any]]
    """The module of each parameter of the bucket."""
    policy: Any
    """The ``MixedPrecisionPolicy`` of the call."""

    def copied(self, memo: Mapping[int, Any]) -> HookArguments:
        """The same about copies of the modules, by ``memo`` of ``copy.deepcopy``."""
        modules = (memo.get(id(reference()), reference()) for reference in self.modules)
        return replace(self, modules=[weakref.ref(module) for module in modules])


def is_wrapper(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of a class that stands around other tensors, or comes with hooks.

    Such a tensor cannot be a view of memory that it shares with others.
    """
    cls = type(tensor)
    if cls is Tensor or _torch.is_fake(tensor):
        return False
    has_hooks = any(hasattr(cls, hook) for hook in (_PRE, _POST, _RELEASE))
    return has_hooks or cls.__torch_dispatch__ is not Tensor.__torch_dispatch__


def gathered_by_itself(local: Tensor, name: str) -> bool:
    """Whether ``local`` has the hooks.

    Raises:
        ExtensionError: it has one of the two that belong together, or only the third.
    """
    found = [hook for hook in (_PRE, _POST) if hasattr(local, hook)]
    if len(found) == 1 or (not found and hasattr(local, _RELEASE)):
        raise ExtensionError(
            f"parameter {name}: {type(local).__name__} has {(*found, _RELEASE)[0]} only; define "
            f"both {_PRE} and {_POST}"
        )
    return bool(found)


def releases_outputs(local: Tensor, name: str) -> bool:
    """Whether what was gathered can be freed as soon as the whole parameter is made of it.

    Raises:
        ExtensionError: the hook returned something else than a bool.
    """
    answer = getattr(local, _RELEASE, bool)()
    if not isinstance(answer, bool):
        raise ExtensionError(
            f"parameter {name}: {_RELEASE} returned {type(answer).__name__}, expected a bool"
        )
    return answer


def carry_attributes(
    old: Tensor,
    new: Tensor,
    made: Mapping[str, Any],
    copied: Callable[[Any], Any] = lambda value: value,
) -> None:
    """Put on ``new`` what was put on ``old`` after it was made with the attributes ``made``.

    ``new`` may have another number of rows: where rows took the place of others, those that both
    have are written to. Methods of ``old`` become methods of ``new``; the rest goes through
    ``copied``.
    """
    for name, value in vars(old).items():
        if name in made and made[name] is value:
            continue
        own: Any = vars(new).get(name)
        if _differ_in_rows(value, own):
            rows = min(len(value), len(own))
            own.narrow(0, 0, rows).copy_(value.narrow(0, 0, rows))
        elif isinstance(value, MethodType) and value.__self__ is old:
            setattr(new, name, _bound_to(value, old, new))
        else:
            setattr(new, name, copied(value))


def _differ_in_rows(one: object, other: object) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or one.shape == other.shape:
        return False
    return one.dim() == other.dim() and one.shape[1:] == other.shape[1:]


def plain(tensor: Tensor) -> Tensor:
    """The values of ``tensor``, whatever its class, in a tensor of none."""
    if type(tensor) is Tensor:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def pre_all_gather(
    local: Tensor, padded: Tensor, shape: torch.Size, index: int, name: str, told: HookArguments
) -> tuple[list[Tensor], Any]:
    """What parameter ``index`` sends from this rank, and the metadata for ``post_all_gather``.

    The hook is called on ``padded``, which may be ``local`` itself; what it puts on it is put on
    ``local``.

    Raises:
        ExtensionError: the hook takes or returns something else than the protocol says.
    """
    hook = _bound_to(getattr(local, _PRE), local, padded)
    num_args = len(inspect.signature(hook).parameters)
    if num_args not in (1, 5):
        raise ExtensionError(
            f"parameter {name}: {_PRE} takes {num_args} arguments, expected (mesh) or (mesh, "
            "outer_size, outer_stride, module, mp_policy)"
        )
    stride = torch.empty(shape, device="meta").stride()
    more = (shape, stride, told.modules[index](), told.policy) if num_args == 5 else ()
    before = dict(vars(padded))
    answer = hook(told.mesh, *more)
    if padded is not local:
        carry_attributes(padded, local, before)
    try:
        tensors, metadata = answer
    except (TypeError, ValueError):
        tensors, metadata = None, None
    if isinstance(tensors, Tensor):
        tensors = (tensors,)
    if not (isinstance(tensors, (tuple, list)) and tensors and all(map(torch.is_tensor, tensors))):
        raise ExtensionError(
            f"parameter {name}: {_PRE} returned {_kind(answer)}, expected a tuple of tensors, not "
            "empty, and metadata"
        )
    return [tensor.detach() for tensor in tensors], metadata


def post_all_gather(
    local: Tensor,
    outputs: tuple[Tensor, ...],
    metadata: Any,
    dtype: torch.dtype,
    *,
    name: str,
    out: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The whole parameter, written to ``out`` if there is one, and what to free with it.

    Raises:
        ExtensionError: the hook returned something else than the protocol says.
    """
    hook = getattr(local, _POST)
    if out is not None:
        with _torch.preserved_versions([out]):
            hook(outputs, metadata, dtype, out=out)
        return out, ()
    answer = hook(outputs, metadata, dtype)
    try:
        whole, to_free = answer
    except (TypeError, ValueError):
        whole, to_free = None, ()
    if not isinstance(whole, Tensor):
        raise ExtensionError(
            f"parameter {name}: {_POST} returned {_kind(answer)}, expected the whole tensor and a "
            "tuple of tensors to free with it"
        )
    return whole, (to_free,) if isinstance(to_free, Tensor) else tuple(to_free)


def _bound_to(hook: Any, old: Tensor, new: Tensor) -> Any:
    """``hook``, if it is a method of ``old``, as the same of ``new``."""
    if isinstance(hook, MethodType) and hook.__self__ is old:
        return MethodType(hook.__func__, new)
    return hook


def _kind(answer: object) -> str:
    """``answer`` without its numbers."""
    if isinstance(answer, tuple):
        return f"({', '.join(type(part).__name__ for part in answer)})"
    return type(answer).__name__
