"""Find out by trials on small tensors how an optimizer class treats its parameters.

Trials run on the CPU, on the same values on all ranks, so all ranks come to the same results. They
touch neither hooks nor random state of the user.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard.errors import ConfigError, UnsupportedError
from fullshard.optim.inner import KeptOptions, options_of, step_without_hooks

Shape = tuple[int, ...]
Found = TypeVar("Found")

LARGE = 1 << 16
"""Elements above which behaviour is assumed to depend on the size modulo the block size only."""

_TENSORS: tuple[Shape, ...] = ((2, 5), (4,), (3, 1, 3))
_LARGE_TENSORS: tuple[Shape, ...] = ((3,), (256, 257))  # large enough for state in blocks
_NUMELS = (10, 4)
_MATRICES: tuple[Shape, ...] = ((2, 5), (4, 3), (3, 3))
_STEPS, _LARGE_STEPS, _SCALED_STEPS = 40, 3, 4  # RAdam changes its rule after six
_SCALE = 1e6  # some classes treat gradients of large norms differently
_LATE, _LATE_STEPS = 20_000, 4  # the step to which counters are set, and the steps from there
_LR = 0.01
_COALESCED_TOLERANCE, _TOLERANCE = 1e-6, 1e-9

_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")

_known: dict[Hashable, Any] = {}
_MAX_KNOWN = 4096

_REFUSALS = {
    "elementwise": (
        "ShardedOptimizer({name}): {name} does not treat every element of a parameter by itself "
        "({reason}), and a rank holds only a part of them. Use OwnedOptimizer, which steps full "
        "tensors, or blocks of elements; or {name} as it is, on DTensors, which know full tensors; "
        "or an optimizer such as AdamW or SGD here. If it is element-wise all the same, say so "
        "with elementwise=True"
    ),
    "independent": (
        "OwnedOptimizer({name}): ranks step different matrices, each once for all gradients, and a "
        "trial of {name} on small matrices did not work so ({reason}). Use a class that steps each "
        "tensor by itself, without a closure; if {name} does, say so with independent=True"
    ),
    "blocks": (
        "OwnedOptimizer({name}): ranks hold pieces of a parameter of shape {shape}, cut every "
        "{block_size} elements, which in a trial {name} did not step as it steps the full tensor "
        "({reason}). Give a multiple of the elements that it quantises together as blocks=, or "
        "leave it out: then owners step each parameter in full"
    ),
    "state": (
        "OwnedOptimizer({name}): its state {key!r} is a {is_a}; expected tensors and numbers, "
        "under names without a dot, so that the state can be shown and saved"
    ),
    "random": (
        "{label}: with {dtype} the class uses random numbers, as for stochastic rounding, which "
        "would depend on the number of ranks; switch them off, or accept them with {accept}"
    ),
}


class Traits(NamedTuple):
    """How a class treats its state and its groups.

    Attributes:
        numbers: names of state that is a Python number, with its type.
        is_late: the class makes state, or gives it another shape, after the first step.
        counts: the class changes options of its groups when it steps.
        makes_state: the class makes state.
    """

    numbers: dict[str, type]
    is_late: bool
    counts: bool
    makes_state: bool

    def merged(self, other: Traits) -> Traits:
        """Return the traits of groups of both kinds."""
        numbers = {**self.numbers, **other.numbers}
        both = zip(self[1:], other[1:], strict=True)
        return Traits(numbers, *(one or its for one, its in both))


class Probe:
    """Trials of one optimizer class with the options of one parameter group.

    Results are kept by class, all options, and the shapes and dtypes of the trial. A trial replaces
    the learning rate and drops the options that schedulers keep in groups. Other options that a
    scheduler changes count when a group is added or a state dict is loaded.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Create a probe; ``options``: those of the parameter group."""
        self.optimizer_class = optimizer_class
        self.kwargs = _safe(kwargs)
        safe = _safe(options)
        self.options = {key: one for key, one in safe.items() if key not in _OF_SCHEDULERS}
        self._key = _key((optimizer_class, self.kwargs, self.options))

    def made(self, params: Sequence[Tensor]) -> Optimizer:
        """Return an optimizer for a trial."""
        return self.optimizer_class([{"params": params, **self.options}], **self.kwargs)

    def once(self, what: Hashable, trial: Callable[[], Found]) -> Found:
        """Return the result of ``trial``, run once for each ``what`` with equal options."""
        key = (self._key, what)
        if key not in _known:
            if len(_known) >= _MAX_KNOWN:
                _known.pop(next(iter(_known)))
            with isolated():
                _known[key] = trial()
        found: Found = _known[key]
        return found

    def refusal(self, kind: str, **facts: object) -> UnsupportedError:
        """Return the error that refuses the class; ``facts``: fields of the message."""
        name = self.optimizer_class.__name__
        return UnsupportedError(_REFUSALS[kind].format(name=name, **facts))

    def check_elementwise(self) -> None:
        """Check that tensors in one flat tensor step as each does by its own optimizer.

        Gradients have norms from 0.1 to 1e7. Steps are the first 40 and, if the class counts in its
        state or options, four late ones.

        Raises:
            UnsupportedError: the results differ, or a step fails.
        """
        self.once("elementwise", self._check_elementwise)

    def _check_elementwise(self) -> None:
        trials = (
            (_TENSORS, _STEPS, 1.0),
            (_TENSORS, _SCALED_STEPS, _SCALE),
            (_LARGE_TENSORS, _LARGE_STEPS, 1.0),
        )
        try:
            is_same = all(
                _Trial(self, shapes, scale, is_coalesced=True).agrees(steps, late=steps == _STEPS)
                for shapes, steps, scale in trials
            )
            sizes_by_key = self._state_sizes() if is_same else {}
        except Exception as error:
            reason = f"its step on coalesced tensors failed: {type(error).__name__}: {error}"
            raise self.refusal("elementwise", reason=reason) from error
        if not is_same:
            raise self.refusal("elementwise", reason="coalesced tensors stepped elsewhere")
        for key, sizes in sizes_by_key.items():
            if sizes is None:
                raise self.refusal("elementwise", reason=f"its state {key!r} is a container")
            if sizes[0] != sizes[1] and sizes != _NUMELS:
                reason = (
                    f"its state {key!r} has neither one value for each element nor a fixed size"
                )
                raise self.refusal("elementwise", reason=reason)

    def _state_sizes(self) -> dict[str, tuple[int, ...] | None]:
        """Return the sizes of each state for ``_NUMELS`` elements; None if it is a container."""
        states: list[dict[str, Any]] = []
        for seed, numel in enumerate(_NUMELS):
            param = nn.Parameter(values_like((numel,), seed))
            optimizer = self.made([param])
            for step in range(2):
                param.grad = values_like((numel,), 10 * step + seed + 3)
                step_without_hooks(optimizer)
            states.append(dict(optimizer.state.get(param, {})))
        return {
            key: None
            if isinstance(value, (list, dict))
            or (isinstance(value, tuple) and any(isinstance(one, Tensor) for one in value))
            else tuple(own[key].numel() if isinstance(own[key], Tensor) else 1 for own in states)
            for key, value in states[0].items()
            if key in states[1]
        }

    def traits(self, *, is_vouched_for: bool) -> Traits:
        """Return the traits of the class, tried on small matrices.

        Args:
            is_vouched_for: do not refuse a class that treats tensors together.

        Raises:
            UnsupportedError: a step fails, as that of a class which calls a closure does; or the
                class does not step each tensor by itself, or keeps state that cannot be shown.
        """
        return self.once(("traits", is_vouched_for), lambda: self._traits(is_vouched_for))

    def _traits(self, is_vouched_for: bool) -> Traits:
        try:
            trial = _Trial(self, _MATRICES)
            traits = trial.traits()
            is_same = trial.agrees(0, late=True)
            is_same = is_same and _Trial(self, _MATRICES, _SCALE).agrees(_SCALED_STEPS)
        except UnsupportedError:
            raise
        except Exception as error:
            if is_vouched_for:
                return Traits({}, is_late=True, counts=True, makes_state=True)
            reason = f"its step failed: {type(error).__name__}: {error}"
            raise self.refusal("independent", reason=reason) from error
        if not is_same and not is_vouched_for:
            reason = "matrices that it stepped together stepped elsewhere"
            raise self.refusal("independent", reason=reason)
        return traits

    def scalar_keys(self) -> frozenset[str]:
        """Return the names of state that has one value for any parameter, such as a step count.

        Found on tensors of several elements, where shapes decide. For a class that cannot step
        these tensors, the result is ``step`` alone.
        """
        return self.once("scalars", self._scalar_keys)

    def _scalar_keys(self) -> frozenset[str]:
        found = {"step"}
        for seed, shape in enumerate(_TENSORS):
            with suppress(Exception):
                param = nn.Parameter(values_like(shape, seed))
                optimizer = self.made([param])
                for step in range(_STEPS):
                    param.grad = values_like(shape, 10 * step + seed + 3)
                    step_without_hooks(optimizer)
                kept = optimizer.state.get(param, {}).items()
                found |= {k for k, v in kept if isinstance(v, Tensor) and v.shape != param.shape}
        return frozenset(found)

    def check_random(self, params: Iterable[Any], label: str, accept: str) -> None:
        """Check that a step of parameters of these dtypes does not use PyTorch's generator.

        Args:
            params: parameters, or pairs of name and parameter.
            label: the optimizer, for the error message.
            accept: the argument that accepts random numbers.

        Raises:
            UnsupportedError: a step uses the generator.
        """
        dtypes = (one[1].dtype if isinstance(one, tuple) else one.dtype for one in params)
        for dtype in dict.fromkeys(dtypes):
            if self.once(("random", dtype), lambda dtype=dtype: self._uses_random(dtype)):  # type: ignore[misc]
                raise self.refusal("random", label=label, dtype=dtype, accept=accept)

    def _uses_random(self, dtype: torch.dtype) -> bool:
        before = torch.get_rng_state()
        with suppress(Exception):  # other trials report the error
            self._stepped_once((2, 5), dtype, torch.ones)
        return not torch.equal(before, torch.get_rng_state())

    def sample(self, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
        """Return the state that a step without a gradient makes for a tensor of this shape.

        For a large shape, return that of a smaller one.
        """
        small = _smaller(shape)
        return self.once(("sample", small, dtype), lambda: self._stepped_once(small, dtype))

    def _stepped_once(
        self, shape: Shape, dtype: torch.dtype, fill: Callable[..., Tensor] = torch.zeros
    ) -> dict[str, Any]:
        param = nn.Parameter(fill(shape, dtype=dtype))
        param.grad = fill(shape, dtype=dtype)
        optimizer = self.made([param])
        with suppress(Exception):  # a class may refuse such a tensor, or need the full one
            step_without_hooks(optimizer)
        return dict(optimizer.state.get(param, {}))

    def check_shapes(self, labels: Mapping[tuple[Shape, torch.dtype], str]) -> None:
        """Let the class refuse matrices before any step, on all ranks alike.

        Args:
            labels: by shape and dtype, the matrix that error messages name.

        Raises:
            ConfigError: the class does not take a matrix of this shape or dtype.
        """
        options = dict(self.options)
        if options.get("fused"):
            options["fused"] = None  # not on meta
        for (shape, dtype), label in labels.items():
            has_gradient = dtype.is_floating_point or dtype.is_complex
            stand_in = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), has_gradient)
            try:
                self.optimizer_class([{"params": [stand_in], **options}], **self.kwargs)
            except Exception as error:
                raise ConfigError(
                    f"OwnedOptimizer({self.optimizer_class.__name__}): the class does not take "
                    f"{label}, a matrix of shape {shape} and {dtype} ({error}); give it to another "
                    "optimizer, or cut it by blocks="
                ) from error


def scalar_keys_of(optimizer: Any) -> frozenset[str]:
    """Return the scalar keys of all groups of an optimizer or of an object similar to one."""
    optimizer_class = getattr(optimizer, "_optimizer_class", type(optimizer))
    kwargs = getattr(optimizer, "defaults", {})
    probes = (Probe(optimizer_class, kwargs, options_of(one)) for one in optimizer.param_groups)
    return frozenset({"step"}).union(*(probe.scalar_keys() for probe in probes))


class _Trial:
    """Tensors that step alone, each by its own optimizer, and copies that step together."""

    def __init__(
        self,
        probe: Probe,
        shapes: Sequence[Shape],
        scale: float = 1.0,
        *,
        is_coalesced: bool = False,
    ) -> None:
        """Create tensors and optimizers.

        Args:
            probe: makes the optimizers.
            shapes: of the tensors.
            scale: factor of gradients.
            is_coalesced: the copies are one flat tensor.
        """
        self._probe, self._scale, self._is_coalesced = probe, scale, is_coalesced
        self._alone = [nn.Parameter(values_like(shape, seed)) for seed, shape in enumerate(shapes)]
        self._together = [nn.Parameter(one) for one in self._copies(self._alone)]
        self._optimizers = [probe.made([param]) for param in self._alone]
        self._optimizers.append(probe.made(self._together))
        self._before = [options_of(one.param_groups[0]) for one in self._optimizers]
        self._count = 0

    def _copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        copies = [one.detach().clone() for one in tensors]
        return [torch.cat([one.flatten() for one in copies])] if self._is_coalesced else copies

    def step(self, count: int) -> None:
        """Make so many steps."""
        for number in range(self._count, self._count + count):
            grads = []
            for seed, param in enumerate(self._alone):
                size = self._scale * 10.0 ** (seed - 1)  # norms of the tensors are far apart
                grads.append(values_like(tuple(param.shape), 10 * number + seed + 3) * size)
            for param, grad in zip(self._alone, grads, strict=True):
                param.grad = grad
            for param, grad in zip(self._together, self._copies(grads), strict=True):
                param.grad = grad
            for optimizer in self._optimizers:
                step_without_hooks(optimizer)
        self._count += count

    def agrees(self, num_steps: int, *, late: bool = False) -> bool:
        """Make more steps; return whether the copies step as the tensors do.

        ``late``: also advance the counters of the optimizers, in state and options, and step.
        """
        tolerance = _COALESCED_TOLERANCE if self._is_coalesced else _TOLERANCE
        self.step(num_steps)
        if late and self.difference() <= tolerance:
            with suppress(Exception):  # a class may check its counters
                for optimizer, before in zip(self._optimizers, self._before, strict=True):
                    self._advance(optimizer, before)
                self.step(_LATE_STEPS)
        return self.difference() <= tolerance

    def _advance(self, optimizer: Optimizer, before: Mapping[str, Any]) -> None:
        counts = (self._count - 1, self._count)
        group = optimizer.param_groups[0]
        changed = {key for key, one in options_of(group).items() if one is not before.get(key)}
        kept = [(own, key) for own in optimizer.state.values() for key in own]
        for own, key in (*kept, *((group, key) for key in changed)):
            value = own[key]
            if isinstance(value, Tensor) and value.numel() == 1 and value.item() in counts:
                value.fill_(_LATE)
            elif type(value) in (int, float) and value in counts:
                own[key] = type(value)(_LATE)

    def traits(self) -> Traits:
        """Make the first steps and return what they show.

        Raises:
            UnsupportedError: the class keeps state that is neither a tensor nor a number.
        """
        counters = KeptOptions(self._optimizers[-1].param_groups)
        self.step(1)
        first = _shapes_of(self._state())
        self.step(_STEPS - 1)
        kept = self._state()
        for key, value in kept.items():
            if not isinstance(value, (Tensor, int, float, type(None))) or "." in str(key):
                raise self._probe.refusal("state", key=key, is_a=type(value).__name__)
        numbers = {key: type(one) for key, one in kept.items() if isinstance(one, (int, float))}
        return Traits(numbers, first != _shapes_of(kept), counters.has_changed(), bool(kept))

    def _state(self) -> dict[str, Any]:
        return dict(self._optimizers[0].state.get(self._alone[0], {}))

    def difference(self) -> float:
        """Return the largest difference, relative to 1 or to the tensor's magnitude if larger."""
        together = torch.cat([one.detach().flatten() for one in self._together])
        parts = together.split([one.numel() for one in self._alone])
        found = []
        for part, one in zip(parts, self._alone, strict=True):
            other = one.detach().flatten()
            is_same = (part == other) | (part.isnan() & other.isnan())
            gaps = torch.where(is_same, 0.0, (part - other).abs())
            found.append(gaps.max() / other.abs().max().clamp(min=1.0))
        return torch.stack(found).max().item()


def _shapes_of(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: getattr(value, "shape", None) for key, value in state.items()}


@contextmanager
def isolated() -> Iterator[None]:
    """Silence warnings, preserve random state, default to the CPU, and compile nothing."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=()), torch.device("cpu"):
        warnings.simplefilter("ignore")
        with torch.compiler.set_stance("force_eager"):
            yield


def values_like(shape: Shape, seed: int) -> Tensor:
    """Return values in (-1, 1), the same on all ranks."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, dtype=torch.float64) * 12.9898 + seed * 78.233).view(shape)


def _smaller(shape: Shape) -> Shape:
    """Return a shape that is no larger than need be, of as many dims, of none much longer.

    As many times as the number of its elements can be halved, it can be, up to 256.
    """
    numel = torch.Size(shape).numel()
    if numel <= 2 * LARGE:
        return shape
    even = math.gcd(numel, 256)
    rows, columns = even * ((256 // even) | 1), 257
    return (*(1 for _ in shape[2:]), rows, columns) if len(shape) > 1 else (rows * columns,)


def _safe(options: Mapping[str, Any]) -> dict[str, Any]:
    """Adapt options to the CPU, with a nonzero learning rate: the user's may start at zero."""
    safe = {key: _plain(value) for key, value in options.items()}
    if isinstance(safe.get("lr"), (int, float)):
        safe["lr"] = _LR
    if "capturable" in safe:
        safe["capturable"] = False
    return safe


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return tuple(map(_plain, value)) if type(value) is tuple else value


def _key(value: Any) -> Hashable:
    """Return a key that is equal for equal values, down to the types of numbers."""
    if isinstance(value, Mapping):
        return tuple((key, _key(one)) for key, one in sorted(value.items()))
    if type(value) in (tuple, list):
        return tuple(map(_key, value))
    try:
        hash(value)
    except TypeError:
        return object()  # equal to no other key: tried again each time
    return (type(value), value)
