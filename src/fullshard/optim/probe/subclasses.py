"""Optimizer state of wrapper subclasses, such as quantised tensors, as the tensors within.

    exp_avg: OptimState8bit      <->      exp_avg.codes, exp_avg.scale, exp_avg.qmap

Any class works that has ``__tensor_flatten__`` and ``__tensor_unflatten__``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard._torch import memory as _memory


def unwrapped(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return state by name, with the tensors within wrappers as ``name.tensor``."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= {f"{key}.{name}": one for name, one in held_by(value).items()} or {key: value}
    return found


def held_by(value: object) -> dict[str, Tensor]:
    """Return the tensors that a wrapper holds, by name; none of others, and of a DTensor."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return {}
    if not _memory.is_wrapper_subclass(value):
        return {}
    names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(value, name) for name in names}


def replace(values: MutableMapping[str, Any], name: str, new: Tensor) -> None:
    """Put a tensor of the same shape in the place of the one that ``unwrapped`` calls so."""
    if name in values:
        values[name] = new
        return
    key, _, inner = name.rpartition(".")
    wrapper = values[key]
    values[key] = rebuilt(wrapper, {**held_by(wrapper), inner: new}, wrapper.shape)


def rebuilt(like: Tensor, held: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    """Return a wrapper as ``like``, of other tensors and perhaps of another shape."""
    kind: Any = type(like)
    _, context = like.__tensor_flatten__()  # type: ignore[attr-defined]
    stride = torch.empty(shape, device="meta").stride()
    return kind.__tensor_unflatten__(held, _reshaped(context, like.shape, shape), shape, stride)  # type: ignore[no-any-return]


def wrapped(
    values: Mapping[str, Any], sample: Mapping[str, Any], shape: torch.Size
) -> dict[str, Any]:
    """Return state with wrappers again, as in ``sample``, a state of the same class.

    Args:
        values: as ``unwrapped`` returns them.
        sample: state of a tensor of any shape.
        shape: of the tensor whose state it is.
    """
    found = dict(values)
    for key, like, inner in _wrappers(values, sample):
        held = {name: found.pop(full) for name, full in inner.items()}
        found[key] = rebuilt(like, held, shape)
    return found


def unheld(names: Collection[str], sample: Mapping[str, Any]) -> list[str]:
    """Return those of ``names``, as ``wrapped`` takes them, that no wrapper in ``sample`` holds."""
    held = {full for _, _, inner in _wrappers(names, sample) for full in inner.values()}
    return [name for name in names if name not in held]


def _wrappers(
    names: Container[str], sample: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor, dict[str, str]]]:
    """Yield the wrappers in ``sample`` of which all tensors are in ``names``, and these names."""
    for key, like in sample.items():
        inner = {name: f"{key}.{name}" for name in held_by(like)}
        if inner and all(name in names for name in inner.values()):
            yield key, like, inner


class Unchanged:
    """A value that ``Optimizer.load_state_dict`` does not cast to the dtype of its parameter."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


def keep_unchanged(
    state_dict: Mapping[str, Any], numbers: Container[Any], but: Container[str] = ()
) -> dict[str, Any]:
    """Return ``state_dict`` with the tensors of parameters ``numbers`` wrapped in ``Unchanged``.

    ``but``: names of state to leave unwrapped.
    """
    state = {
        number: {
            key: Unchanged(one) if isinstance(one, Tensor) and key not in but else one
            for key, one in own.items()
        }
        if number in numbers
        else own
        for number, own in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def plain(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of which some may be ``Unchanged`` as they are."""
    return {key: one.value if isinstance(one, Unchanged) else one for key, one in own.items()}


def loaded(
    own: Mapping[str, Any],
    param: Tensor,
    numbers: Container[str],
    sample: Callable[[], Mapping[str, Any]],
) -> dict[str, Any]:
    """Return ``unwrapped`` state; give ``Unchanged`` tensors their dtype and device.

    State gets the dtype that the class gives it. If the class makes no such state, state of floats
    gets the parameter's dtype, as with ``Optimizer.load_state_dict``. Tensors
    replace numbers that older versions of the class have kept.

    Args:
        own: values, or values that are ``Unchanged``.
        param: whose state it is.
        numbers: names of state that is a number now.
        sample: returns state that the class makes.
    """
    found = unwrapped(plain(own))
    cast = [key for key, one in own.items() if isinstance(one, Unchanged) and key != "step"]
    keys = [key for key in found if key in cast or key.rpartition(".")[0] in cast]
    tensors = [found[key] for key in keys]
    odd = any(one.is_floating_point() and one.dtype != param.dtype for one in tensors)
    old = [
        key for key, one in found.items() if isinstance(one, (int, float)) and key not in numbers
    ]
    made = unwrapped(sample()) if odd or old else {}
    for key in keys:
        one, like = found[key], made.get(key, made.get(key.rpartition(".")[0])) if odd else None
        dtype = param.dtype if like is None and one.is_floating_point() else one.dtype
        found[key] = one.to(param.device, like.dtype if isinstance(like, Tensor) else dtype)
    for key in old:
        like = made.get(key)
        if isinstance(like, Tensor):
            found[key] = torch.full(like.shape, found[key], dtype=like.dtype, device="cpu")
    return found


def _reshaped(context: Any, old: torch.Size, new: torch.Size) -> Any:
    """Return what a wrapper keeps beside tensors, in which its shape may occur."""
    if isinstance(context, (tuple, list, torch.Size)) and tuple(context) == tuple(old):
        return type(context)(new)
    if isinstance(context, (tuple, list)):
        return type(context)(_reshaped(one, old, new) for one in context)
    if isinstance(context, dict):
        return {key: _reshaped(one, old, new) for key, one in context.items()}
    return context
