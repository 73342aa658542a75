"""The values that a dry run knows: results of constants and of integers of the batch."""

from __future__ import annotations

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
            out = op(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if not _asks_for_values(op, error):
                raise
            if not follows:
                raise Unknown(f"{op} asks for values") from error
            found = self._on_values(op, args, kwargs)
            if not isinstance(found, (Tensor, tuple, list)):
                return found  # a number
            out = tree_map(_like_on_meta, found)
        else:
            made = tensors_in(out) if follows and not isinstance(out, (bool, int, float)) else []
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
        """Return whether ``op`` can be computed from known values."""
        for tensor in given:
            if tensor.numel() > _MOST_NUMEL or tensor.requires_grad:
                return False
            if tensor.is_meta and tensor not in self._known:
                return False
        if torch.Tag.nondeterministic_seeded in op.tags:
            return False
        return bool(given) or _makes_constants(op, kwargs)

    def _value(self, one: Any) -> Any:
        if isinstance(one, Tensor) and one.is_meta:
            return self._known[one]
        return one

    def _forget_written(self, op: Any, args: Any) -> None:
        """Forget the values of tensors that ``op`` overwrites with unknown values."""
        for argument, given in zip(op._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for one in tensors_in(given):
                    if one in self._known:
                        self._forget_all_over(self._known[one])

    def _forget_all_over(self, value: Tensor) -> None:
        same = [
            tensor for tensor, known in self._known.items() if _memory.shares_storage(known, value)
        ]
        for tensor in same:
            del self._known[tensor]


def _makes_constants(op: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether ``op`` makes a tensor on the meta device from numbers alone."""
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "meta":
        return False
    return not op.overloadpacket.__name__.startswith("empty")


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("device") is None or torch.device(kwargs["device"]).type != "meta":
        return kwargs
    return {**kwargs, "device": torch.device("cpu")}


def _like_on_meta(one: Any) -> Any:
    return torch.empty_like(one, device="meta") if isinstance(one, Tensor) else one


def _asks_for_values(op: Any, error: Exception) -> bool:
    if torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags:
        return True
    return "meta tensors" in str(error).lower()
