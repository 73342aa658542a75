"""Tensors that control their own all-gather: ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

A local tensor may have these methods, from its class or set on the object.

    fsdp_pre_all_gather(mesh)                                             -> (tensors, metadata)
    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, policy)   -> (tensors, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None)     -> (param, to_free) | None
    fsdp_should_release_all_gather_outputs_after_post_all_gather()        -> bool

The third hook is optional. The pre hook returns the tensors to gather, any number of plain tensors
of any dtypes. The post hook builds the unsharded parameter from the gathered tensors, first as a
new tensor, later in ``out``, which is the very tensor that modules compute with. The third hook
returns whether the parameter uses separate memory, so that the gathered tensors can be freed at
once. The protocol is that of ``torch.distributed.fsdp.fully_shard``.

The pre hook is called on the local tensor itself if this is on the device and as large as rank 0's.
Otherwise it is called on a stand-in that is padded and on the device. So hooks need not pad and
never see an empty tensor. Attributes set on either of the two tensors are copied to the other.
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

from fullshard._torch import autograd as _autograd
from fullshard._torch import memory as _memory
from fullshard.errors import ExtensionError

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


@dataclass(frozen=True)
class HookArguments:
    """The arguments of hooks that are not tensors."""

    mesh: DeviceMesh
    """1-D mesh of the ranks that share one copy of the parameters."""
    modules: Sequence[weakref.ref[Any]]
    """The module of each parameter of the bucket."""
    policy: Any
    """The ``MixedPrecisionPolicy`` that was given to ``fully_shard``."""

    def copied(self, memo: Mapping[int, Any]) -> HookArguments:
        """Return these arguments for the copied modules, found in ``memo`` of ``copy.deepcopy``."""
        modules = (memo.get(id(reference()), reference()) for reference in self.modules)
        return replace(self, modules=[weakref.ref(module) for module in modules])


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is of a wrapper subclass, or of a class with all-gather hooks.

    Such a tensor cannot be a view of memory that it shares with other tensors.
    """
    cls = type(tensor)
    if cls is Tensor or _memory.is_fake(tensor):
        return False
    has_hooks = any(hasattr(cls, hook) for hook in (_PRE, _POST, _RELEASE))
    return has_hooks or cls.__torch_dispatch__ is not Tensor.__torch_dispatch__


def gathered_by_itself(local: Tensor, name: str) -> bool:
    """Return whether ``local`` has the pre hook and the post hook.

    Raises:
        ExtensionError: if ``local`` has only one of these two hooks, or only the third hook.
    """
    found = [hook for hook in (_PRE, _POST) if hasattr(local, hook)]
    if len(found) == 1 or (not found and hasattr(local, _RELEASE)):
        raise ExtensionError(
            f"parameter {name}: {type(local).__name__} has {(*found, _RELEASE)[0]} only; define "
            f"both {_PRE} and {_POST}"
        )
    return bool(found)


def releases_outputs(local: Tensor, name: str) -> bool:
    """Return whether gathered tensors can be freed as soon as the unsharded parameter is built.

    Raises:
        ExtensionError: if the hook does not return a bool.
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
    """Carry over to ``new`` the attributes that ``old`` has gained or changed since it was made.

    ``made`` has the attributes with which ``old`` was made. If both tensors have an attribute whose
    values are tensors that differ only in rows, the rows that both have are copied. Methods of
    ``old`` become methods of ``new``; all other values go through ``copied``.
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
    """Return the values of ``tensor`` in a plain tensor, which is ``tensor`` itself if plain."""
    if type(tensor) is Tensor:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def pre_all_gather(
    local: Tensor, padded: Tensor, shape: torch.Size, index: int, name: str, told: HookArguments
) -> tuple[list[Tensor], Any]:
    """Return the tensors parameter ``index`` sends, and the metadata for ``post_all_gather``.

    The hook is called on ``padded``, which may be ``local`` itself; attributes that the hook sets
    on ``padded`` are set on ``local`` too.

    Raises:
        ExtensionError: if the hook's arguments or result do not follow the protocol.
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
    """Return the unsharded parameter, in ``out`` if given, and the tensors to free with it.

    Raises:
        ExtensionError: if the hook's result does not follow the protocol.
    """
    hook = getattr(local, _POST)
    if out is not None:
        with _autograd.preserved_versions((out,)):
            hook(outputs, metadata, dtype, out=out)
        return out, ()
    answer = hook(outputs, metadata, dtype)
    try:
        full, to_free = answer
    except (TypeError, ValueError):
        full, to_free = None, ()
    if not isinstance(full, Tensor):
        raise ExtensionError(
            f"parameter {name}: {_POST} returned {_kind(answer)}, expected the full tensor and a "
            "tuple of tensors to free with it"
        )
    return full, (to_free,) if isinstance(to_free, Tensor) else tuple(to_free)


def _bound_to(hook: Any, old: Tensor, new: Tensor) -> Any:
    """Return ``hook``, bound to ``new`` if ``hook`` is a method of ``old``."""
    if isinstance(hook, MethodType) and hook.__self__ is old:
        return MethodType(hook.__func__, new)
    return hook


def _kind(answer: object) -> str:
    """Describe the types in ``answer``, without values."""
    if isinstance(answer, tuple):
        return f"({', '.join(type(part).__name__ for part in answer)})"
    return type(answer).__name__
