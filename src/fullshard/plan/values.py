"""The values that a dry run knows: results of constants and of integers of the batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from fullshard._torch import memory as _memory

_MOST_NUMEL = 1 << 20


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in arguments or results of an operation, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    for one in tree.values() if isinstance(tree, dict) else tree or ():
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (list, tuple)):
            found += tensors_in(one)
    return found


class Unknown(Exception):
    """An operation asks for a value that cannot be computed from known values."""


class Values:
    """The values of some tensors on the meta device.

    Programs read small tensors of integers: they check if positions restart at 0, or if a mask is
    all ones. If all arguments of an operation are known, it also runs on their values, on the CPU.
    A view of a known tensor has a view of its value, so a write to one changes the other.
    """

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()
        self._results = _Results()

    def learn(self, tensor: Tensor, value: Tensor) -> None:
        """Store ``value``, on the CPU, as the elements of ``tensor``, unless it is large."""
        if value.numel() <= _MOST_NUMEL:
            self._known[tensor] = value

    def run(self, op: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        """Run ``op`` on tensors of the meta device, and on their values if all are known.

        Raises:
            Unknown: ``op`` asks for values, and some of its tensors ``given`` have no known value.
        """
        follows = self._follows(op, kwargs, given)
        if not follows and op._schema.is_mutable:
            self._forget_written(op, args)
        try:
            out = op(*args, **kwargs) if follows else self._results.of(op, args, kwargs, given)
        except (RuntimeError, NotImplementedError) as error:
            if not _asks_for_values(op, error):
                raise
            if not follows:
                raise Unknown(f"{op} asks for values") from error
            found = self._on_values(op, args, kwargs)
            device = kwargs.get("device")
            is_for_cpu = device is not None and torch.device(device).type == "cpu"
            if is_for_cpu or not isinstance(found, (Tensor, tuple, list)):
                return found  # values on the CPU, or a number
            out = tree_map(_like_on_meta, found)
        else:
            follows = follows and not isinstance(out, (bool, int, float))
            made = [one for one in tensors_in(out) if one.is_meta] if follows else []
            if not made or any(one.numel() > _MOST_NUMEL for one in made):
                return out
            found = self._on_values(op, args, kwargs)
        for tensor, value in zip(tensors_in(out), tensors_in(found), strict=True):
            if tensor.is_meta:
                self.learn(tensor, value)
        return out

    def _on_values(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return op(*tree_map(self._value, args), **_on_cpu(tree_map(self._value, kwargs)))

    def _follows(self, op: Any, kwargs: dict[str, Any], given: list[Tensor]) -> bool:
        """Return whether ``op`` can be computed from known values, or from numbers alone."""
        for tensor in given:
            if tensor.numel() > _MOST_NUMEL or tensor.requires_grad:
                return False
            if tensor.is_meta and tensor not in self._known:
                return False
        if torch.Tag.nondeterministic_seeded in op.tags:
            return False
        if given:
            return True
        return _is_on_meta(kwargs) and not op.overloadpacket.__name__.startswith("empty")

    def _value(self, one: Any) -> Any:
        if isinstance(one, Tensor) and one.is_meta:
            return self._known[one]
        return one

    def _forget_written(self, op: Any, args: Any) -> None:
        """Forget the values of tensors that ``op`` overwrites with unknown values."""
        for argument, given in zip(op._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for one in tensors_in(given):
                    value = self._known.get(one)
                    for tensor, known in list(self._known.items()) if value is not None else ():
                        if _memory.shares_storage(known, value):
                            del self._known[tensor]


class _Results:
    """Cached results of operations on the meta device, by the metadata of their arguments.

    PyTorch computes most results in Python, and models repeat their blocks.
    """

    def __init__(self) -> None:
        self._known: dict[object, Callable[[list[Tensor]], Any] | None] = {}

    def of(self, op: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        """Return what ``op`` returns; ``given`` are the tensors in its arguments."""
        try:
            key = op, _looks(args), _looks(tuple(kwargs.items()))
            again = self._known.get(key)
        except TypeError:  # an argument without a hash
            return op(*args, **kwargs)
        if again is not None:
            return again(given)
        out = op(*args, **kwargs)
        if key not in self._known:
            self._known[key] = _repeated(op, out, given)
        return out


def _looks(one: Any) -> object:
    """Return a key of everything in ``one`` that results on the meta device depend on."""
    if isinstance(one, Tensor):
        return one.shape, one.stride(), one.dtype, one.device
    if isinstance(one, (tuple, list)):
        return type(one), *map(_looks, one)
    return type(one), one


def _repeated(op: Any, out: Any, given: list[Tensor]) -> Callable[[list[Tensor]], Any] | None:
    """Return a function that makes ``out`` again; None if the result cannot be cached.

    Results may be new tensors, or arguments that were written to.
    """
    changes_looks = torch.Tag.inplace_view in op.tags
    if op.namespace != "aten" or changes_looks or any(one.is_out for one in op._schema.arguments):
        return None
    if out is None:
        return lambda _: None
    made = [out] if isinstance(out, Tensor) else out
    if type(made) not in (list, tuple) or not all(isinstance(one, Tensor) for one in made):
        return None
    likes: list[tuple[torch.Size, tuple[int, ...], torch.dtype] | int] = []
    for one in made:
        number = next((n for n, its in enumerate(given) if its is one), None)
        if number is not None:
            likes.append(number)
            continue
        if type(one) is not Tensor or not one.is_meta or not makes_memory(op):
            return None
        like = one.shape, one.stride(), one.dtype
        likes.append(like)
        if _new(*like).untyped_storage().nbytes() != one.untyped_storage().nbytes():
            return None

    kind = None if isinstance(out, Tensor) else type(out)  # to keep ``out`` would keep its memory

    def again(now: list[Tensor]) -> Any:
        found = [now[one] if isinstance(one, int) else _new(*one) for one in likes]
        return found[0] if kind is None else kind(found)

    return again


def _new(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


@cache
def makes_memory(op: Any) -> bool:
    """Return whether the results of ``op`` have new memory, not that of its arguments."""
    return all(one.alias_info is None for one in op._schema.returns)


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs if kwargs.get("device") is None else {**kwargs, "device": torch.device("cpu")}


def _is_on_meta(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


def _like_on_meta(one: Any) -> Any:
    return torch.empty_like(one, device="meta") if isinstance(one, Tensor) else one


def _asks_for_values(op: Any, error: Exception) -> bool:
    depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return not depends.isdisjoint(op.tags) or "meta tensor" in str(error).lower()
