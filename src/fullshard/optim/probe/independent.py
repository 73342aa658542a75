"""Find out by trials what an optimizer class does with full tensors and their state."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard.errors import ConfigError, UnsupportedError
from fullshard.optim.inner import KeptOptions, options_of, step_without_hooks
from fullshard.optim.probe.elementwise import (
    LATE_STEPS,
    SCALE,
    SCALED_STEPS,
    STEPS,
    apart,
    exactly,
    isolated,
    safe_group_options,
    safe_options,
    set_forward,
    values_like,
)

_SHAPES = ((2, 5), (4, 3), (3, 3))

_TOLERANCE = 1e-9

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

    def merged(self, other: Traits) -> Traits:
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
    how = (optimizer_class, safe_options(kwargs), safe_group_options(options))
    key = (exactly(how), is_vouched_for)
    if key not in _known:
        try:
            with isolated():
                traits, off = _try(*how, num_steps=STEPS)
                if off <= _TOLERANCE:
                    off = _try(*how, num_steps=SCALED_STEPS, scale=SCALE)[1]
        except UnsupportedError:
            raise
        except Exception as error:
            if is_vouched_for:
                return Traits({}, is_late=True, counts=True, makes_state=True)
            raise _refusal(
                optimizer_class, f"its step failed: {type(error).__name__}: {error}"
            ) from error
        if not off <= _TOLERANCE and not is_vouched_for:
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
    optimizer_class: type[Optimizer],
    kwargs: dict[str, Any],
    options: dict[str, Any],
    *,
    num_steps: int,
    scale: float = 1.0,
) -> tuple[Traits, float]:
    """Step matrices together and alone; return traits and the largest relative difference."""
    alone = [nn.Parameter(values_like(shape, seed)) for seed, shape in enumerate(_SHAPES)]
    both = [nn.Parameter(param.detach().clone()) for param in alone]
    optimizers = [
        optimizer_class([{"params": params, **options}], **kwargs)
        for params in (*([param] for param in alone), both)
    ]
    before = [options_of(optimizer.param_groups[0]) for optimizer in optimizers]
    counters = KeptOptions(optimizers[-1].param_groups)
    shapes: list[dict[str, Any]] = []

    def steps(numbers: range) -> None:
        for step in numbers:
            for seed, (one, other) in enumerate(zip(alone, both, strict=True)):
                size = scale * 10.0 ** (seed - 1)
                grad = values_like(tuple(one.shape), 10 * step + seed + 3) * size
                one.grad, other.grad = grad, grad.clone()
            for optimizer in optimizers:
                step_without_hooks(optimizer)
            kept = optimizers[0].state.get(alone[0], {})
            shapes.append({key: getattr(value, "shape", None) for key, value in kept.items()})

    steps(range(num_steps))
    kept = optimizers[0].state.get(alone[0], {})
    _check_kinds(optimizer_class, kept)
    numbers = {key: type(one) for key, one in kept.items() if isinstance(one, (int, float))}
    traits = Traits(numbers, shapes[0] != shapes[-1], counters.has_changed(), bool(kept))
    off = _apart(both, alone)
    with suppress(Exception):  # a class may check its counters
        for optimizer, options in zip(optimizers, before, strict=True):
            set_forward(optimizer, options, num_steps)
        steps(range(num_steps, num_steps + LATE_STEPS))
        off = _apart(both, alone)
    return traits, off


def _apart(both: list[nn.Parameter], alone: list[nn.Parameter]) -> float:
    return apart(torch.cat([param.detach().flatten() for param in both]), alone)


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
