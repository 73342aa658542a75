"""Pieces of a tensor that a class steps in blocks, each block by itself, such as 8-bit AdamW.

    w, 10 elements         | 0 1 2 3 | 4 5 6 7 | 8 9 |      blocks of 4, a short one at the end
    exp_avg.codes          | c c c c | c c c c | c c |      4 for each block
    exp_avg.scale          | s       | s       | s   |      1 for each block
    exp_avg.qmap           | q q q q q                      0: the same for any tensor
    step                     3                              0

A piece begins at a block, and its state is a part of the whole's. What a class decides by the size
of a tensor, such as whether to quantise it, it decides when it makes state. So a piece is stepped
for the first time within a tensor that has zeros beside it, and is about as large as the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard._torch import autograd as _autograd
from fullshard.errors import UnsupportedError
from fullshard.optim.inner import Inner, Steppable, step_quietly
from fullshard.optim.probe.elementwise import (
    exactly,
    kind_of,
    tame,
    tame_group,
    unseen,
    values_like,
)
from fullshard.optim.probe.subclasses import held_by, rebuilt, unwrapped

Shape = tuple[int, ...]
Units = dict[str, int]
"""By name of the state: how many of it, counted on the first dim, belong to a block."""

LARGE = 1 << 16
"""Elements: a class treats all tensors alike that are larger, and equal modulo the block."""

_STEPS = 3

_samples: dict[object, dict[str, Any]] = {}
_units: dict[object, Units] = {}


class Recipe(NamedTuple):
    """How the optimizer of a parameter group is made."""

    optimizer_class: type[Optimizer]
    kwargs: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def key(self) -> object:
        """Return a key that is equal for groups that a trial treats alike."""
        return exactly((self.optimizer_class, tame(self.kwargs), tame_group(self.options)))

    @property
    def kind(self) -> object:
        """Return a key that is equal for groups whose state has the same form."""
        return kind_of((self.optimizer_class, tame(self.kwargs), tame_group(self.options)))

    def made(self, params: Sequence[Tensor]) -> Optimizer:
        """Return an optimizer for a trial."""
        return self.optimizer_class(
            [{"params": params, **tame_group(self.options)}], **tame(self.kwargs)
        )


def padded_numel(numel: int, whole: int, grain: int) -> int:
    """Return how large a tensor must be that a class treats as one of ``whole`` elements.

    At least ``numel``, at most ``whole``, equal to it modulo ``grain``.
    """
    least = max(numel, min(whole, max(LARGE, 2 * grain)))
    return least + (whole - least) % grain


def sample(recipe: Recipe, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Return the state that the class makes for a tensor of this shape, perhaps of a smaller one.

    Made by a step without a gradient, on the CPU.
    """
    shape = _smaller(shape)
    key = (recipe.kind, shape, dtype)
    if key not in _samples:
        with unseen():
            param = nn.Parameter(torch.zeros(shape, dtype=dtype))
            param.grad = torch.zeros_like(param)
            optimizer = recipe.made([param])
            with suppress(Exception):  # a class may refuse such a tensor, or have to have it whole
                step_quietly(optimizer)
            _samples[key] = dict(optimizer.state.get(param, {}))
    return _samples[key]


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


def units_of(
    recipe: Recipe, shape: Shape, dtype: torch.dtype, grain: int, *, is_vouched_for: bool
) -> Units:
    """Return how much of each state belongs to a block, having tried that blocks are independent.

    Args:
        recipe: the class, its arguments and options.
        shape: of the whole parameter.
        dtype: its dtype.
        grain: elements of a block, or of several.
        is_vouched_for: believe that pieces step as they do within the whole.

    Raises:
        UnsupportedError: a piece, begun at a multiple of ``grain``, steps otherwise than the same
            elements of the whole do, or has other state.
    """
    numel = padded_numel(0, torch.Size(shape).numel(), grain)
    key = (recipe.key, numel, len(shape), dtype, grain, is_vouched_for)
    if key not in _units:
        sizes = () if is_vouched_for else (min(4 * grain, numel), numel)  # few may tell already
        found = (_refusal(recipe, size, shape, dtype, grain) for size in sizes)
        reason = next(filter(None, found), "")
        if reason:
            name = recipe.optimizer_class.__name__
            raise UnsupportedError(
                f"OwnedOptimizer({name}): ranks hold pieces of a parameter of shape {shape}, cut "
                f"every {grain} elements, which in a trial {name} did not step as it steps the "
                f"whole ({reason}). Give a multiple of the elements that it quantises together as "
                "blocks=, or leave that out: then each parameter is stepped whole, by its owner"
            )
        _units[key] = _units_by_size(recipe, numel, dtype, grain)
    return _units[key]


def _refusal(recipe: Recipe, numel: int, shape: Shape, dtype: torch.dtype, grain: int) -> str:
    """Return what is wrong with pieces of so many elements, if something is."""
    try:
        units = _units_by_size(recipe, numel, dtype, grain)
        return _difference(recipe, numel, shape, dtype, units, grain)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _units_by_size(recipe: Recipe, numel: int, dtype: torch.dtype, grain: int) -> Units:
    """Compare the state of a tensor with that of one that is larger, or smaller, by a block."""
    known = _shapes(recipe, numel, dtype)
    for other in (numel + grain, numel - grain):
        its = _shapes(recipe, other, dtype)
        if {key: (len(s), s[1:]) for key, s in known.items()} == {
            key: (len(s), s[1:]) for key, s in its.items()
        }:
            return {key: abs(sum(s[:1]) - sum(its[key][:1])) for key, s in known.items()}
    raise UnsupportedError(f"its state of {numel} elements is unlike that of a block more or less")


def _shapes(recipe: Recipe, numel: int, dtype: torch.dtype) -> dict[str, torch.Size]:
    param = nn.Parameter(torch.zeros(numel, dtype=dtype))
    param.grad = torch.zeros_like(param)
    with unseen():
        optimizer = recipe.made([param])
        step_quietly(optimizer)
    state = unwrapped(optimizer.state.get(param, {}))
    return {key: getattr(value, "shape", torch.Size()) for key, value in state.items()}


def _difference(
    recipe: Recipe, numel: int, shape: Shape, dtype: torch.dtype, units: Units, grain: int
) -> str:
    """Step a tensor whole and in pieces; return what differs, if something does."""
    many = -(-numel // grain)
    starts = sorted({0, grain, grain * ((many + 1) // 2)} - {many * grain})
    stops = [*starts[1:], numel]
    dims = (*(1 for _ in shape[1:]), numel)  # as many as the parameter's
    whole = nn.Parameter(_values(numel, 0, grain).to(dtype).view(dims))
    flat = whole.detach().view(-1)
    with unseen():
        inner = Inner(recipe.optimizer_class, tame(recipe.kwargs))
        groups: Any = [{**tame_group(recipe.options), "params": []}]
        reference = recipe.made([whole])
        pieces = [
            _Piece(GrainPiece(start, stop - start, numel, grain), flat[start:stop].clone())
            for start, stop in zip(starts, stops, strict=True)
        ]
        groups[0] = {**inner.converted(groups[0]), "params": []}
        inner.set_runs(groups, [pieces])
        for step in range(_STEPS):
            grad = _values(numel, step + 1, grain).to(dtype)
            whole.grad = grad.view(dims).clone()
            step_quietly(reference)
            for one in pieces:
                one.tensor.grad = grad[one.piece.start :][: one.piece.numel].clone()
            first = [First(one, one.piece, units) for one in pieces] if not step else []
            with widened(inner, first):
                for one in pieces if inner.is_eager and not step else ():
                    inner.set_state(one, inner.first_state(one, groups[0]))
                inner.step(groups, {})
    return _compared(whole, reference.state[whole], inner, pieces, units)


def _compared(
    whole: Tensor, state: Mapping[str, Any], inner: Inner, pieces: Sequence[_Piece], units: Units
) -> str:
    joined = torch.cat([one.tensor.detach() for one in pieces])
    if not torch.equal(joined, whole.detach().view(-1)):
        return "parameters differ"
    own = [unwrapped(inner.state_of(one) or {}) for one in pieces]
    for key, value in unwrapped(state).items():
        if not isinstance(value, Tensor):
            if any(one[key] != value for one in own):
                return f"state {key!r} differs"
            continue
        parts = [one[key] for one in own] if units[key] else [own[0][key]]
        if not torch.equal(_bits(torch.cat([p.reshape(-1) for p in parts])), _bits(value)):
            return f"state {key!r} differs"
    return ""


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def _values(numel: int, seed: int, grain: int) -> Tensor:
    """Return values whose largest differ from block to block."""
    number = torch.arange(numel, device="cpu") // max(1, grain // 4)
    return values_like((numel,), seed) * (1 + number % 7) ** 2


class GrainPiece(NamedTuple):
    """Elements of a parameter, begun at a multiple of ``grain``.

    Attributes:
        start: the elements of the parameter before it.
        numel: its elements.
        whole: the elements of the parameter.
        grain: elements of a block, or of several.
    """

    start: int
    numel: int
    whole: int
    grain: int

    @property
    def wide(self) -> int:
        """Elements of the tensor within which it is stepped for the first time."""
        return padded_numel(self.numel, self.whole, self.grain)

    @property
    def front(self) -> int:
        """How many of these are before it: the last piece comes last, it may end in a block."""
        return self.wide - self.numel if self.start + self.numel == self.whole else 0

    def widened(self, own: Tensor) -> Tensor:
        """Return the piece with zeros beside it."""
        wide = own.new_zeros(self.wide)
        wide[self.front :][: self.numel] = own
        return wide

    def state(self, wide: Mapping[str, Any], units: Units) -> dict[str, Any]:
        """Return its part of the state of the tensor that it was stepped in."""
        return {key: self._part(key, value, units) for key, value in wide.items()}

    def _part(self, key: str, value: Any, units: Units) -> Any:
        held = held_by(value)
        if held:
            own = {name: self._part(f"{key}.{name}", one, units) for name, one in held.items()}
            return rebuilt(value, own, torch.Size([self.numel]))
        unit = units.get(key, 0)
        if not unit:
            return value
        first = self.front // self.grain * unit
        stop = None if self.front else first + -(-self.numel // self.grain) * unit
        return value[first:stop].clone()


class _Piece:
    """A piece of a trial."""

    def __init__(self, piece: GrainPiece, own: Tensor) -> None:
        self.piece, self.tensor = piece, nn.Parameter(own)


class First(NamedTuple):
    """A piece that has no state yet, with the tensor that is stepped."""

    run: Steppable
    piece: GrainPiece
    units: Units


@contextmanager
def widened(inner: Inner, pieces: Sequence[First]) -> Iterator[None]:
    """Widen pieces while they are stepped for the first time; memory and gradients are lent."""
    pieces = [one for one in pieces if one.piece.wide > one.piece.numel]
    own = [(one.run.tensor.data, one.run.tensor.grad) for one in pieces]
    for (run, piece, _), (memory, grad) in zip(pieces, own, strict=True):
        _autograd.set_grad(run.tensor, None)
        run.tensor.data = piece.widened(memory)
        _autograd.set_grad(run.tensor, None if grad is None else piece.widened(grad))
    try:
        yield
    except BaseException:
        for one in pieces:
            inner.forget(one.run)
        raise
    for (run, piece, units), (memory, grad) in zip(pieces, own, strict=True):
        memory.copy_(run.tensor.data.view(-1)[piece.front :][: piece.numel])
        _autograd.set_grad(run.tensor, None)
        run.tensor.data = memory
        _autograd.set_grad(run.tensor, grad)
        values = inner.state_of(run)
        if values:
            inner.set_state(run, piece.state(values, units))
