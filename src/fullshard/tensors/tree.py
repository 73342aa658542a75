"""Find and replace tensors inside the inputs and outputs of modules."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fullshard.errors import UnsupportedError

_MAX_DEPTH = 128


def find_tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield every tensor in nested lists, tuples, named tuples, mappings and dataclasses.

    Sets and objects of other classes are not searched.

    Raises:
        UnsupportedError: if ``value`` is nested more than 128 deep, or contains itself.
    """
    if isinstance(value, Tensor):
        yield value
        return
    if value is None or isinstance(value, (int, float, str, bool)):
        return
    for part in _parts(value):
        _check_depth(depth)
        yield from find_tensors(part, depth + 1)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, Mapping):
        yield from value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield getattr(value, field.name, None)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any, depth: int = 0) -> Any:
    """Return ``value`` with ``function`` applied to all tensors of ``find_tensors``, and in sets.

    A container without changed tensors is returned itself. Mappings keep their class if it can be
    copied and assigned to; a ``PackedSequence`` is returned as it is.

    Raises:
        UnsupportedError: as in ``find_tensors``.
    """
    if isinstance(value, Tensor):
        return function(value)
    if value is None or isinstance(value, (int, float, str, bool, PackedSequence)):
        return value
    _check_depth(depth)

    def inner(part: Any) -> Any:
        return map_tensors(function, part, depth + 1)

    if isinstance(value, (list, tuple)):
        parts = [inner(part) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping):
        return _map_mapping(inner, value)
    if isinstance(value, set):
        members = {inner(part) for part in value}
        return value if members == value else members
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(inner, value)
    return value


def _map_mapping(inner: Callable[[Any], Any], value: Mapping[Any, Any]) -> Any:
    changed = {key: inner(part) for key, part in value.items()}
    if all(changed[key] is value[key] for key in changed):
        return value
    if type(value) is dict:
        return changed
    try:
        copied: Any = value.copy()  # type: ignore[attr-defined]
        if type(copied) is not type(value):
            copied = copy.copy(value)
        for key, part in changed.items():
            copied[key] = part
    except (AttributeError, TypeError):
        return changed
    return copied


def _map_dataclass(inner: Callable[[Any], Any], value: Any) -> Any:
    old = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    new = {name: inner(part) for name, part in old.items()}
    changed = {name: part for name, part in new.items() if part is not old[name]}
    return dataclasses.replace(value, **changed) if changed else value


def _check_depth(depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise UnsupportedError(
            f"an input or output of a sharded module is nested more than {_MAX_DEPTH} deep, or "
            "holds itself: pass tensors in flatter structures"
        )
