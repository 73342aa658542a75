"""Helpers for the parameter groups of torch's optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Groups = Sequence[dict[str, Any]]  # an optimizer's ``param_groups``

_NAMES = ("params", "param_names")


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a group without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in _NAMES}


class KeptOptions:
    """Options of groups, as they were before a step that is made in several parts."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._options = [options_of(group) for group in groups]
        values = [value for options in self._options for value in options.values()]
        self._tensors = [(one, one.clone()) for one in values if isinstance(one, Tensor)]

    def restore(self) -> None:
        """Take back all that the class has counted since, so that it counts that once a step."""
        for group, options in zip(self._groups, self._options, strict=True):
            for key in options_of(group).keys() - options.keys():
                del group[key]
            group.update(options)
        with torch.no_grad():
            for tensor, before in self._tensors:
                tensor.copy_(before)

    def has_changed(self) -> bool:
        """Return whether any option is another than before."""
        return [options_of(group) for group in self._groups] != self._options or not all(
            torch.equal(tensor, before) for tensor, before in self._tensors
        )


def numbered(groups: Groups) -> Iterator[tuple[int, Tensor]]:
    """Yield the group number of each parameter, and the parameter."""
    for number, group in enumerate(groups):
        for param in group["params"]:
            yield number, param


def named(groups: Groups) -> Iterator[tuple[int, str, Tensor]]:
    """Yield the group number of each parameter, its name or "", and the parameter."""
    for number, group in enumerate(groups):
        names = group.get("param_names") or [""] * len(group["params"])
        for name, param in zip(names, group["params"], strict=True):
            yield number, name, param


def label_of(groups: Groups, param: Tensor) -> str:
    """Return a label for error messages: the name of ``param`` if given, else index or shape."""
    for number, group in enumerate(groups):
        for index, one in enumerate(group["params"]):
            if one is param:
                names = group.get("param_names")
                if names:
                    return f"parameter {names[index]!r}"
                return f"parameter {index} of group {number}, of shape {tuple(param.shape)}"
    return f"a parameter of shape {tuple(param.shape)}"
