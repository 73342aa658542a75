"""Helpers for the parameter groups of torch's optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

Groups = Sequence[dict[str, Any]]  # an optimizer's ``param_groups``

_NAMES = ("params", "param_names")


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a group without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in _NAMES}


def numbered(groups: Groups) -> Iterator[tuple[int, Tensor]]:
    """Yield the group number of each parameter, and the parameter."""
    for number, group in enumerate(groups):
        for param in group["params"]:
            yield number, param


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
