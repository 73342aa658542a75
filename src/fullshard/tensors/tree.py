"""Find and replace tensors inside the inputs and outputs of modules."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fullshard.errors import UnsupportedError

_Function = Callable[[Tensor], Tensor]

_SIMPLE = (int, float, str, bool, type(None))


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested lists, tuples, named tuples, dicts and dataclasses.

    Containers may hold themselves; each is entered once. Sets, mappings that are no ``dict`` or
    ``UserDict``, and objects of other classes are not searched.
    """
    if isinstance(value, Tensor):
        yield value
        return
    open_parts = [iter((value,))]
    entered: dict[int, Any] = {}
    while open_parts:
        for part in open_parts[-1]:
            if isinstance(part, Tensor):
                yield part
            elif not isinstance(part, _SIMPLE) and id(part) not in entered:
                parts = _parts(part)
                if len(parts):
                    entered[id(part)] = part
                    open_parts.append(iter(parts))
                    break
        else:
            open_parts.pop()


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, (list, tuple)):
        return value
    items = _items(value)
    if items is not None:
        return [part for _, part in items]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return ()


def _items(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return what a ``dict`` or ``UserDict`` has stored, whatever its class computes on access."""
    if isinstance(value, UserDict):
        value = vars(value).get("data")
    if isinstance(value, OrderedDict):
        return OrderedDict.items(value)
    return dict.items(value) if isinstance(value, dict) else None


def map_tensors(function: _Function, value: Any, *, must_copy: bool = False) -> Any:
    """Return ``value`` with ``function`` applied to all tensors of ``find_tensors``, and in sets.

    A container without changed tensors is returned itself. Any other container is copied by
    ``copy.copy``, so that the copy keeps its class and all attributes; a container may hold itself.
    A ``PackedSequence`` is returned as it is.

    Args:
        function: of a tensor.
        value: a container, a tensor, or anything else.
        must_copy: whether to raise if a container cannot be copied. If False, that container is
            left as it is, with a warning.

    Raises:
        UnsupportedError: see ``must_copy``.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _SIMPLE) or (type(value) in (tuple, dict) and not value):
        return value
    return _Change(function, must_copy).of(value)


class _Change:
    """One call of ``map_tensors``."""

    def __init__(self, function: _Function, must_copy: bool) -> None:
        self._function = function
        self._must_copy = must_copy
        self._made: dict[int, Any] = {}
        """New values, by id of the old ones, which ``_old`` keeps alive."""
        self._old: dict[int, Any] = {}
        self._changed: set[int] = set()
        self._unfilled: list[tuple[Any, Any]] = []
        """Containers and their copies, which have the old parts."""

    def of(self, value: Any) -> Any:
        self._look(value)
        result = self._new(value)
        while self._unfilled:
            self._fill(*self._unfilled.pop())
        return result

    def _look(self, value: Any) -> None:
        """Find the tensors, and the containers that have to change because they hold some."""
        holders: dict[int, list[int]] = {}
        pending = [value]
        self._old[id(value)] = value
        changed: list[int] = []
        while pending:
            holder = pending.pop()
            for part in self._parts(holder):
                if isinstance(part, _SIMPLE):
                    continue
                holders.setdefault(id(part), []).append(id(holder))
                if id(part) in self._old:
                    continue
                self._old[id(part)] = part
                if not isinstance(part, Tensor):
                    pending.append(part)
                    continue
                self._made[id(part)] = self._function(part)
                if self._made[id(part)] is not part:
                    changed.append(id(part))
        while changed:
            for holder_id in holders.get(changed.pop(), ()):
                if holder_id not in self._changed:
                    self._changed.add(holder_id)
                    changed.append(holder_id)

    def _parts(self, value: Any) -> Sequence[Any]:
        if isinstance(value, PackedSequence):
            return ()
        return list(value) if isinstance(value, set) else _parts(value)

    def _new(self, value: Any) -> Any:
        """Return what comes in place of ``value``, perhaps with parts that are filled in later."""
        if id(value) in self._made:
            return self._made[id(value)]
        if id(value) not in self._changed:
            return value
        parts = [self._new(part) for part in value] if isinstance(value, (tuple, set)) else []
        reason = "copy.copy() returned the same object, or one of another class or length"
        try:
            new = self._copied(value, parts)
        except Exception as error:
            new, reason = None, f"{type(error).__name__}: {error}"
        return self._made.setdefault(id(value), self._left(value, reason) if new is None else new)

    def _copied(self, value: Any, parts: Sequence[Any]) -> Any:
        """Return a copy, of a tuple or set with new ``parts``; None if it is no proper one."""
        if isinstance(value, tuple):
            return _tuple_like(value, parts)
        if isinstance(value, set):
            return type(value)(parts)
        try:
            new = copy.copy(value)
        except Exception:  # by a class that refuses to set items
            if not isinstance(value, dict):
                raise
            new = _dict_like(value)
        if new is value or type(new) is not type(value) or len(_parts(new)) != len(_parts(value)):
            return None
        self._unfilled.append((value, new))
        return new

    def _left(self, value: Any, reason: str) -> Any:
        words = (
            f"a {type(value).__name__} among the inputs or outputs of a sharded module cannot be "
            f"copied ({reason})"
        )
        if self._must_copy:
            raise UnsupportedError(
                f"{words}; pass its tensors in a container that copy.copy() can copy"
            )
        warnings.warn(f"{words}, so its tensors are left as they are", stacklevel=2)
        return value

    def _fill(self, value: Any, new: Any) -> None:
        """Put new parts into ``new``, a copy of ``value``."""
        if isinstance(value, list):
            for number, part in enumerate(value):
                list.__setitem__(new, number, self._new(part))
            return
        items = _items(value)
        if items is not None:
            for key, part in items:
                made = self._new(part)
                if made is not part:
                    _set_item(new, key, made)
            return
        for field in dataclasses.fields(value):
            part = getattr(value, field.name, None)
            made = self._new(part)
            if made is not part:
                object.__setattr__(new, field.name, made)  # it may be frozen


def _tuple_like(value: Any, parts: Sequence[Any]) -> Any:
    """Return ``parts`` as a tuple of the class of ``value``, with its attributes."""
    try:
        new: Any = tuple.__new__(type(value), parts)
    except TypeError:  # of torch.return_types
        return type(value)(parts)
    if hasattr(value, "__dict__"):
        vars(new).update(vars(value))
    return new


def _dict_like(value: dict[Any, Any]) -> Any:
    """Return a copy of ``value`` that its class has no part in."""
    new: Any = type(value).__new__(type(value))
    for key, part in _items(value) or ():
        _put(new, key, part)
    if hasattr(value, "__dict__"):
        vars(new).update(vars(value))
    return new


def _set_item(new: Any, key: Any, part: Any) -> None:
    """Set an item by the class, which may have attributes for items, or past it if it refuses."""
    try:
        new[key] = part
    except Exception:
        _put(new.data if isinstance(new, UserDict) else new, key, part)


def _put(new: Any, key: Any, part: Any) -> None:
    (OrderedDict if isinstance(new, OrderedDict) else dict).__setitem__(new, key, part)
