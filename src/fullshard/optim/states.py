"""The state of single parameters, as the user sees it, edits it and loads it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.errors import ConfigError
from fullshard.optim.groups import Groups, label_of

__all__ = ["StateOf", "ages_of", "check_state", "is_cut", "is_placed_like"]

StateOf = Mapping[Tensor, dict[str, Any]]  # an optimizer's ``state``


def is_cut(param: Tensor, value: object) -> bool:
    """Whether ``value`` has an element for each of ``param``; a step count, say, has not."""
    if isinstance(param, DTensor):
        return isinstance(value, DTensor)
    return isinstance(value, Tensor) and value.shape == param.shape


def is_placed_like(param: Tensor, other: Tensor) -> bool:
    """Whether both are plain tensors, or DTensors of which ranks hold the same elements."""
    if isinstance(param, DTensor) and isinstance(other, DTensor):
        return param.placements == other.placements and param.device_mesh == other.device_mesh
    return isinstance(param, DTensor) == isinstance(other, DTensor)


def check_state(groups: Groups, param: Tensor, own: Mapping[str, Any]) -> None:
    """Refuse state that has an element for each of the parameter's but lies otherwise.

    Raises:
        ConfigError: it does.
    """
    for key, value in own.items():
        looks_cut = isinstance(value, DTensor) or (
            isinstance(value, Tensor) and value.shape == param.shape and value.dim() > 0
        )
        if looks_cut and not (value.shape == param.shape and is_placed_like(param, value)):
            raise ConfigError(
                f"{label_of(groups, param)}: its state {key!r} is a {_describe(value)}, the "
                f"parameter a {_describe(param)}; state that was saved whole or cut otherwise is "
                "loaded with set_optimizer_state_dict of torch.distributed.checkpoint.state_dict"
            )


def _describe(tensor: Tensor) -> str:
    placed = ""
    if isinstance(tensor, DTensor):
        shape = tuple(tensor.device_mesh.shape)
        placed = f" placed as {tensor.placements} on a mesh of shape {shape}"
    return f"{'DTensor' if placed else 'plain tensor'} of shape {tuple(tensor.shape)}{placed}"


def ages_of(params: Sequence[Tensor], state: StateOf) -> list[Hashable]:
    """For each parameter what must be equal where parameters share state.

    That is the value of everything that is not cut, and which cut tensors of which kind there are.
    """
    owns = [state.get(param, {}) for param in params]
    values = _values_of(
        value
        for param, own in zip(params, owns, strict=True)
        for value in own.values()
        if isinstance(value, Tensor) and not is_cut(param, value)
    )
    return [tuple((key, _trait(value, values)) for key, value in own.items()) for own in owns]


def _trait(value: object, values: Mapping[int, Hashable]) -> Hashable:
    if isinstance(value, Tensor):
        return values.get(id(value), ("cut", value.dtype, value.device))
    try:
        hash(value)
    except TypeError:
        return ("is", id(value))
    return (type(value), value)


def _values_of(tensors: Iterable[Tensor]) -> dict[int, Hashable]:
    """What small tensors hold, by ``id``: read in one go, as each reading waits for the device."""
    alike: dict[tuple[torch.device, torch.dtype, torch.Size], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype, tensor.shape), []).append(tensor)
    values: dict[int, Hashable] = {}
    for kind, those in alike.items():
        rows = torch.stack(those).reshape(len(those), those[0].numel()).tolist()
        values |= {id(t): (*kind, tuple(row)) for t, row in zip(those, rows, strict=True)}
    return values
