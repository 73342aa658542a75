"""Trials that tell whether an optimizer updates each element independently."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard.errors import UnsupportedError
from fullshard.optim.inner import options_of, step_without_hooks

_SHAPES = ((2, 5), (4,), (3, 1, 3))
STEPS = 40  # RAdam changes its update rule after six
LATE_STEPS = 4  # once counters are set forward
SCALE, SCALED_STEPS = 1e6, 4  # of gradients: some classes treat those of large norms otherwise
_LATE = 20_000  # the step to which counters are set
_LARGE_SHAPES = ((3,), (256, 257))  # some classes quantise state of large tensors, in blocks
_LARGE_STEPS = 3
_LR = 0.01
_TOLERANCE = 1e-6

_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")

_passed: set[Hashable] = set()
_scalars: dict[Hashable, frozenset[str]] = {}


def check_elementwise(
    optimizer_class: type[Optimizer], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Check that tensors in one flat tensor step as each does by its own optimizer.

    The tensors are small, on the CPU and the same on all ranks; hooks and random state of the user
    are not touched. Gradients have norms from 0.1 to 1e7. Steps are the first 40 and, if the class
    counts in its state or options, four late ones.

    A class that has passed is not tried again with the same options. The learning rate is not an
    option here: a trial replaces it, so groups may differ in it. Options that a scheduler
    changes are tried only at ``add_param_group`` or when a state dict is loaded.

    Args:
        optimizer_class: the class to try.
        kwargs: its arguments.
        options: the options of the parameter group.

    Raises:
        UnsupportedError: the results differ, or a step fails.
    """
    how = (optimizer_class, safe_options(kwargs), safe_group_options(options))
    key = exactly(how)
    if key in _passed:
        return
    try:
        with isolated():
            off = _try(_SHAPES, STEPS, *how, late=True)
            if off <= _TOLERANCE:
                off = _try(_SHAPES, SCALED_STEPS, *how, scale=SCALE)
            if off <= _TOLERANCE:
                off = _try(_LARGE_SHAPES, _LARGE_STEPS, *how)
    except Exception as error:
        reason = f"its step on coalesced tensors failed: {type(error).__name__}: {error}"
        raise _refusal(optimizer_class, reason) from error
    if not off <= _TOLERANCE:
        raise _refusal(optimizer_class, "coalesced tensors stepped elsewhere")
    _passed.add(key)


def scalar_keys(
    optimizer_class: type[Optimizer], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> frozenset[str]:
    """Return the names of state that has one value for any parameter, such as a step count.

    Found by a trial as in ``check_elementwise``, on tensors of several elements, where shapes
    decide. For a class that cannot step these tensors, the result is ``step`` alone.
    """
    kwargs, options = safe_options(kwargs), safe_group_options(options)
    key = (optimizer_class, kind_of(kwargs), kind_of(options))
    if key not in _scalars:
        found = {"step"}
        for seed, shape in enumerate(_SHAPES):
            with suppress(Exception), isolated():
                found |= _scalars_on(shape, seed, optimizer_class, kwargs, options)
        _scalars[key] = frozenset(found)
    return _scalars[key]


def scalar_keys_of(optimizer: Any) -> frozenset[str]:
    """Return ``scalar_keys`` for all groups of an optimizer or of an object similar to one."""
    optimizer_class = getattr(optimizer, "_optimizer_class", type(optimizer))
    kwargs = getattr(optimizer, "defaults", {})
    found = (scalar_keys(optimizer_class, kwargs, options_of(g)) for g in optimizer.param_groups)
    return frozenset({"step"}).union(*found)


def refuse(optimizer_class: type[Optimizer]) -> None:
    """Raise the error of a failed trial.

    Raises:
        UnsupportedError: always.
    """
    raise _refusal(optimizer_class, "elementwise=False says so")


def _refusal(optimizer_class: type[Optimizer], reason: str) -> UnsupportedError:
    name = optimizer_class.__name__
    return UnsupportedError(
        f"ShardedOptimizer({name}): {name} does not treat every element of a parameter by itself "
        f"({reason}), and a rank holds only a part of them. Use OwnedOptimizer, which steps full "
        f"tensors, or blocks of elements; or {name} as it is, on DTensors, which know full "
        "tensors; or an optimizer such as AdamW or SGD here. If it is element-wise all the same, "
        "say so with elementwise=True"
    )


def _try(
    shapes: Sequence[tuple[int, ...]],
    num_steps: int,
    optimizer_class: type[Optimizer],
    kwargs: dict[str, Any],
    options: dict[str, Any],
    *,
    scale: float = 1.0,
    late: bool = False,
) -> float:
    """Return the largest relative difference between tensors stepped alone and coalesced.

    With ``late``, set counters forward after ``num_steps``, and step on.
    """
    alone = [nn.Parameter(values_like(shape, seed)) for seed, shape in enumerate(shapes)]
    coalesced = nn.Parameter(_flat(alone))
    optimizers = [
        optimizer_class([{"params": [param], **options}], **kwargs) for param in (*alone, coalesced)
    ]
    before = [options_of(optimizer.param_groups[0]) for optimizer in optimizers]

    def steps(numbers: range) -> None:
        for step in numbers:
            for seed, param in enumerate(alone):
                # norms, maxima and means of the three are far apart
                size = scale * 10.0 ** (seed - 1)
                param.grad = values_like(tuple(param.shape), 10 * step + seed + 3) * size
            coalesced.grad = _flat([param.grad for param in alone if param.grad is not None])
            for optimizer in optimizers:
                step_without_hooks(optimizer)

    steps(range(num_steps))
    off = apart(coalesced, alone)
    if late and off <= _TOLERANCE:
        for optimizer, options in zip(optimizers, before, strict=True):
            set_forward(optimizer, options, num_steps)
        with suppress(Exception):  # a class may check its counters
            steps(range(num_steps, num_steps + LATE_STEPS))
            off = apart(coalesced, alone)
    return off


def apart(coalesced: Tensor, alone: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to 1 or the tensor's largest magnitude if larger."""
    parts = coalesced.detach().flatten().split([one.numel() for one in alone])
    found = []
    for part, one in zip(parts, alone, strict=True):
        other = one.detach().flatten()
        is_same = (part == other) | (part.isnan() & other.isnan())
        gaps = torch.where(is_same, 0.0, (part - other).abs())
        found.append(gaps.max() / other.abs().max().clamp(min=1.0))
    return torch.stack(found).max().item()


def set_forward(optimizer: Optimizer, before: Mapping[str, Any], count: int) -> None:
    """Advance the step counters in the state and among options, which now stand at ``count``.

    Args:
        optimizer: whose parameters are in one group.
        before: the options before the first step.
        count: the steps that were made.
    """
    counts = (count - 1, count)
    group = optimizer.param_groups[0]
    changed = {key for key, one in options_of(group).items() if one is not before.get(key)}
    kept = [(own, key) for own in optimizer.state.values() for key in own]
    for own, key in (*kept, *((group, key) for key in changed)):
        value = own[key]
        if isinstance(value, Tensor) and value.numel() == 1 and value.item() in counts:
            value.fill_(_LATE)
        elif type(value) in (int, float) and value in counts:
            own[key] = type(value)(_LATE)


def _scalars_on(
    shape: tuple[int, ...],
    seed: int,
    optimizer_class: type[Optimizer],
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> set[str]:
    """Return the names of state whose shape differs from that of its parameter."""
    param = nn.Parameter(values_like(shape, seed))
    optimizer = optimizer_class([{"params": [param], **options}], **kwargs)
    for step in range(STEPS):
        param.grad = values_like(shape, 10 * step + seed + 3)
        step_without_hooks(optimizer)
    kept = optimizer.state.get(param, {}).items()
    return {key for key, one in kept if isinstance(one, Tensor) and one.shape != param.shape}


@contextmanager
def isolated() -> Iterator[None]:
    """Silence warnings, preserve random state, default to the CPU, and compile nothing."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=()), torch.device("cpu"):
        warnings.simplefilter("ignore")
        with torch.compiler.set_stance("force_eager"):
            yield


def _flat(tensors: list[Any]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def values_like(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return values in (-1, 1), the same on all ranks."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, dtype=torch.float64) * 12.9898 + seed * 78.233).view(shape)


def safe_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Adapt options to the CPU, with a nonzero learning rate: the user's may start at zero."""
    safe = {key: _plain(value) for key, value in options.items()}
    if isinstance(safe.get("lr"), (int, float)):
        safe["lr"] = _LR
    if "capturable" in safe:
        safe["capturable"] = False
    return safe


def safe_group_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Do the same for options of a group, without those that schedulers keep there."""
    return {key: value for key, value in safe_options(options).items() if key not in _OF_SCHEDULERS}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return tuple(map(_plain, value)) if type(value) is tuple else value


def exactly(value: Any) -> Hashable:
    """Return a key, equal for options with which a trial does the same."""
    return _key(value, lambda one: one)


def kind_of(value: Any) -> Hashable:
    """Return a key, equal for options with which a class makes state of the same form.

    The key of a float says only whether it is zero: schedulers change floats from step to step, and
    forms are asked for in each save.
    """
    return _key(value, bool)


def _key(value: Any, of_float: Callable[[float], Hashable]) -> Hashable:
    if isinstance(value, Mapping):
        return tuple((key, _key(one, of_float)) for key, one in sorted(value.items()))
    if type(value) in (tuple, list):
        return tuple(_key(one, of_float) for one in value)
    if isinstance(value, float):
        return ("float", of_float(value))
    if isinstance(value, Tensor) and value.numel() == 1:
        return ("tensor", value.device.type)
    try:
        hash(value)
    except TypeError:
        return object()  # equal to no other key: tried again each time
    return (type(value), value)
