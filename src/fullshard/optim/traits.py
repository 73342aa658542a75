"""Find out by trials what an optimizer class does with whole tensors and their state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard.errors import ConfigError, UnsupportedError
from fullshard.optim.groups import Kept
from fullshard.optim.inner import step_quietly
from fullshard.optim.trial import kind_of, tame, unseen, values_like

_SHAPES = ((2, 5), (4, 3), (3, 3))
_STEPS = 8

_known: dict[object, Traits] = {}


class Traits(NamedTuple):
    """What a trial has shown of a class.

    Attributes:
        numbers: names of state that is a Python number, with its type.
        is_late: the class makes state, or gives it another shape, after the first step.
        counts: the class changes options of its groups when it steps.
        makes_state: it makes state.
    """

    numbers: dict[str, type]
    is_late: bool
    counts: bool
    makes_state: bool

    def joined(self, other: Traits) -> Traits:
        """Return what is true of groups of one kind or of the other."""
        numbers = {**self.numbers, **other.numbers}
        both = zip(self[1:], other[1:], strict=True)
        return Traits(numbers, *(one or its for one, its in both))


def traits_of(
    optimizer_class: type[Optimizer],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    is_vouched_for: bool,
) -> Traits:
    """Return the traits of a class, tried on small matrices, on the CPU, equal on all ranks.

    Args:
        optimizer_class: the class.
        kwargs: its arguments.
        options: the options of the parameter group.
        is_vouched_for: do not refuse a class that treats tensors together.

    Raises:
        UnsupportedError: a step of the class fails, as one that calls a closure does, the class
            does not step each tensor by itself, or it keeps state of a kind that cannot be shown.
    """
    key = (optimizer_class, kind_of(kwargs), kind_of(options), is_vouched_for)
    if key not in _known:
        try:
            with unseen():
                traits, off = _try(optimizer_class, tame(kwargs), tame(options))
        except UnsupportedError:
            raise
        except Exception as error:
            if is_vouched_for:
                return Traits({}, is_late=True, counts=True, makes_state=True)
            raise _refusal(
                optimizer_class, f"its step failed: {type(error).__name__}: {error}"
            ) from error
        if not off <= 1e-9 and not is_vouched_for:
            raise _refusal(optimizer_class, "matrices that it stepped together stepped elsewhere")
        _known[key] = traits
    return _known[key]


def _refusal(optimizer_class: type[Optimizer], reason: str) -> UnsupportedError:
    name = optimizer_class.__name__
    return UnsupportedError(
        f"OwnedOptimizer({name}): ranks step different matrices, each once for all gradients, and "
        f"a trial of {name} on small matrices did not work so ({reason}). Use a class that steps "
        f"each tensor by itself, without a closure; if {name} does, say so with independent=True"
    )


def _try(
    optimizer_class: type[Optimizer], kwargs: dict[str, Any], options: dict[str, Any]
) -> tuple[Traits, float]:
    """Step matrices together and alone; return traits and the largest difference."""
    alone = [nn.Parameter(values_like(shape, seed)) for seed, shape in enumerate(_SHAPES)]
    both = [nn.Parameter(param.detach().clone()) for param in alone]
    optimizers = [
        optimizer_class([{"params": params, **options}], **kwargs)
        for params in (*([param] for param in alone), both)
    ]
    counters = Kept(optimizers[-1].param_groups)
    shapes: list[dict[str, Any]] = []
    for step in range(_STEPS):
        for seed, (one, other) in enumerate(zip(alone, both, strict=True)):
            grad = values_like(tuple(one.shape), 10 * step + seed + 3) * 10.0 ** (seed - 1)
            one.grad, other.grad = grad, grad.clone()
        for optimizer in optimizers:
            step_quietly(optimizer)
        kept = optimizers[0].state.get(alone[0], {})
        shapes.append({key: getattr(value, "shape", None) for key, value in kept.items()})
    _check_kinds(optimizer_class, kept)
    numbers = {key: type(one) for key, one in kept.items() if isinstance(one, (int, float))}
    gaps = [(a - b).abs().max().item() for a, b in zip(alone, both, strict=True)]
    is_late = shapes[0] != shapes[-1]
    return Traits(numbers, is_late, counters.has_changed(), bool(kept)), max(gaps)


def _check_kinds(optimizer_class: type[Optimizer], kept: Mapping[str, Any]) -> None:
    for key, value in kept.items():
        if not isinstance(value, (Tensor, int, float, type(None))) or "." in str(key):
            raise UnsupportedError(
                f"OwnedOptimizer({optimizer_class.__name__}): its state {key!r} is a "
                f"{type(value).__name__}; expected tensors and numbers, under names without a dot, "
                "so that the state can be shown and saved"
            )


def check_shapes(
    optimizer_class: type[Optimizer],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    matrices: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> None:
    """Let the class refuse matrices before any step, on all ranks alike.

    Args:
        optimizer_class: the class.
        kwargs: its arguments.
        options: the options of the parameter group.
        matrices: shape and dtype by a label for error messages.

    Raises:
        ConfigError: the class does not take a matrix of this shape or dtype.
    """
    tried: set[object] = set()
    options = {**options, "fused": None} if options.get("fused") else options  # not on meta
    for label, (shape, dtype) in matrices.items():
        if (shape, dtype) in tried:
            continue
        tried.add((shape, dtype))
        stand_in = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        try:
            optimizer_class([{"params": [stand_in], **options}], **kwargs)
        except Exception as error:
            raise ConfigError(
                f"OwnedOptimizer({optimizer_class.__name__}): the class does not take {label}, a "
                f"matrix of shape {shape} and {dtype} ({error}); give it to another optimizer, or "
                "cut it by blocks="
            ) from error
