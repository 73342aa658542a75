"""The optimizer state of a parameter: which state is shaped like it, which is a scalar."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard._torch import dtensor as _dtensor
from fullshard.errors import ConfigError
from fullshard.optim.inner import Groups, label_of

StateOf = Mapping[Tensor, dict[str, Any]]  # an optimizer's ``state``


def is_cut(
    key: str,
    shape: torch.Size | None,
    full: torch.Size,
    scalars: Container[str],
    *,
    is_dtensor: bool = False,
) -> bool:
    """Return whether state has one element per parameter element, unlike a step count.

    Shapes decide, except for parameters of one element, where both kinds of state may look alike.

    Args:
        key: the optimizer's name of the state.
        shape: shape of the state; None if the state is not a tensor.
        full: shape of the parameter, or of the part of the parameter that the optimizer steps.
        scalars: names of state with one value for any parameter, see ``scalar_keys``.
        is_dtensor: whether the state is a DTensor; only state with many elements is.
    """
    if is_dtensor or shape != full:
        return is_dtensor
    return full.numel() != 1 or key not in scalars


def is_cut_tensor(param: Tensor, key: str, value: object, scalars: Container[str]) -> bool:
    """Return whether the optimizer state ``value`` is cut like its parameter ``param``."""
    if isinstance(param, DTensor) or not isinstance(value, Tensor):
        return isinstance(value, DTensor)
    return is_cut(key, value.shape, param.shape, scalars)


def is_placed_like(param: Tensor, other: Tensor) -> bool:
    """Return whether both are plain tensors, or DTensors of one mesh, placements and shape."""
    if isinstance(param, DTensor) and isinstance(other, DTensor):
        return _dtensor.are_placed_alike(param, other)
    return isinstance(param, DTensor) == isinstance(other, DTensor)


def one_for_many(kept: Iterable[tuple[torch.Size, str, torch.Size | None]]) -> set[str]:
    """Return the names of state that has one value for a parameter of several elements.

    Args:
        kept: the shape of a parameter, the name of one of its states, the shape of this state.
    """
    return {
        key
        for full, key, shape in kept
        if shape is not None and shape.numel() == 1 and full.numel() > 1
    }


def check_state(
    groups: Groups, param: Tensor, own: Mapping[str, Any], scalars: Container[str]
) -> None:
    """Check that state with one element per parameter element is placed like the parameter.

    Raises:
        ConfigError: its shape or its placement differs from the parameter's.
    """
    for key, value in own.items():
        if not isinstance(value, Tensor):
            continue
        is_dtensor = isinstance(value, DTensor)
        looks_cut = is_cut(key, value.shape, param.shape, scalars, is_dtensor=is_dtensor)
        if looks_cut and not (value.shape == param.shape and is_placed_like(param, value)):
            raise ConfigError(
                f"{label_of(groups, param)}: its state {key!r} is a {_describe(value)}, the "
                f"parameter a {_describe(param)}; state that was saved in full or cut otherwise is "
                "loaded with set_optimizer_state_dict of torch.distributed.checkpoint.state_dict"
            )


def _describe(tensor: Tensor) -> str:
    placed = ""
    if isinstance(tensor, DTensor):
        shape = tuple(tensor.device_mesh.shape)
        placed = f" placed as {tensor.placements} on a mesh of shape {shape}"
    return f"{'DTensor' if placed else 'plain tensor'} of shape {tuple(tensor.shape)}{placed}"


def state_keys_of(
    params: Sequence[Tensor], state: StateOf, scalars: Container[str]
) -> list[Hashable]:
    """Return the state key of each parameter; a run has parameters of one key.

    A key has the value of all state that is not cut, and name, dtype and device of cut tensors.
    """
    owns = [state.get(param, {}) for param in params]
    values = _values_of(
        value
        for param, own in zip(params, owns, strict=True)
        for key, value in own.items()
        if isinstance(value, Tensor) and not is_cut_tensor(param, key, value, scalars)
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
    """Return the values of small tensors by ``id``, in few reads: each waits for the device."""
    alike: dict[tuple[torch.device, torch.dtype, torch.Size], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype, tensor.shape), []).append(tensor)
    values: dict[int, Hashable] = {}
    for kind, those in alike.items():
        rows = torch.stack(those).reshape(len(those), those[0].numel()).tolist()
        values |= {id(t): (*kind, tuple(row)) for t, row in zip(those, rows, strict=True)}
    return values
