"""Pieces of a tensor that a class steps in blocks, each block by itself, such as 8-bit AdamW.

    w, 10 elements         | 0 1 2 3 | 4 5 6 7 | 8 9 |      blocks of 4, a short one at the end
    exp_avg.codes          | c c c c | c c c c | c c |      4 for each block
    exp_avg.scale          | s       | s       | s   |      1 for each block
    exp_avg.qmap           | q q q q q                      0: the same for any tensor
    step                     3                              0

A piece begins at a block, and its state is a part of the full tensor's. A class decides by the size
of a tensor, for example, whether to quantise its state, when it makes the state. So the first step
of a piece is a step of a tensor about as large as the full one, with zeros beside the piece.
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
from fullshard.optim.inner import Inner, Steppable, step_without_hooks
from fullshard.optim.probe.elementwise import (
    exactly,
    isolated,
    kind_of,
    safe_group_options,
    safe_options,
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
_rng_users: dict[object, bool] = {}


class Recipe(NamedTuple):
    """How the optimizer of a parameter group is made."""

    optimizer_class: type[Optimizer]
    kwargs: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def key(self) -> object:
        """Return a key that is equal for groups that a trial treats alike."""
        return exactly(
            (self.optimizer_class, safe_options(self.kwargs), safe_group_options(self.options))
        )

    @property
    def kind(self) -> object:
        """Return a key that is equal for groups whose state has the same form."""
        return kind_of(
            (self.optimizer_class, safe_options(self.kwargs), safe_group_options(self.options))
        )

    def made(self, params: Sequence[Tensor]) -> Optimizer:
        """Return an optimizer for a trial."""
        return self.optimizer_class(
            [{"params": params, **safe_group_options(self.options)}], **safe_options(self.kwargs)
        )


def padded_numel(numel: int, full: int, block_size: int) -> int:
    """Return how large a tensor must be that a class treats as one of ``full`` elements.

    At least ``numel``, at most ``full``, equal to it modulo ``block_size``.
    """
    least = max(numel, min(full, max(LARGE, 2 * block_size)))
    return least + (full - least) % block_size


def sample(recipe: Recipe, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Return the state that the class makes for a tensor of this shape, perhaps of a smaller one.

    Made by a step without a gradient, on the CPU.
    """
    shape = _smaller(shape)
    key = (recipe.kind, shape, dtype)
    if key not in _samples:
        with isolated():
            param = nn.Parameter(torch.zeros(shape, dtype=dtype))
            param.grad = torch.zeros_like(param)
            optimizer = recipe.made([param])
            with suppress(Exception):  # a class may refuse such a tensor, or need the full one
                step_without_hooks(optimizer)
            _samples[key] = dict(optimizer.state.get(param, {}))
    return _samples[key]


def uses_rng(recipe: Recipe, dtype: torch.dtype) -> bool:
    """Return whether a step of a small matrix of this dtype uses PyTorch's generator."""
    key = (recipe.key, dtype)
    if key not in _rng_users:
        with isolated():
            param = nn.Parameter(torch.ones(2, 5, dtype=dtype))
            param.grad = torch.ones_like(param)
            before = torch.get_rng_state()
            try:
                step_without_hooks(recipe.made([param]))
            except Exception:
                return False  # other trials report the error
            _rng_users[key] = not torch.equal(before, torch.get_rng_state())
    return _rng_users[key]


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
    recipe: Recipe, shape: Shape, dtype: torch.dtype, block_size: int, *, is_vouched_for: bool
) -> Units:
    """Return how much of each state belongs to a block, having tried that blocks are independent.

    Args:
        recipe: the class, its arguments and options.
        shape: of the full parameter.
        dtype: its dtype.
        block_size: elements of a block, or of several.
        is_vouched_for: believe that pieces step as they do within the full tensor.

    Raises:
        UnsupportedError: a piece, begun at a multiple of ``block_size``, steps unlike the same
            elements of the full tensor, or has other state.
    """
    numel = padded_numel(0, torch.Size(shape).numel(), block_size)
    key = (recipe.key, numel, len(shape), dtype, block_size, is_vouched_for)
    if key not in _units:
        sizes = (
            () if is_vouched_for else (min(4 * block_size, numel), numel)
        )  # few may tell already
        found = (_refusal(recipe, size, shape, dtype, block_size) for size in sizes)
        reason = next(filter(None, found), "")
        if reason:
            name = recipe.optimizer_class.__name__
            raise UnsupportedError(
                f"OwnedOptimizer({name}): ranks hold pieces of a parameter of shape {shape}, cut "
                f"every {block_size} elements, which in a trial {name} did not step as it steps "
                f"the full tensor ({reason}). Give a multiple of the elements that it quantises "
                "together as blocks=, or leave it out: then owners step each parameter in full"
            )
        _units[key] = _units_by_size(recipe, numel, dtype, block_size)
    return _units[key]


def _refusal(recipe: Recipe, numel: int, shape: Shape, dtype: torch.dtype, block_size: int) -> str:
    """Return what is wrong with pieces of so many elements, if something is."""
    try:
        units = _units_by_size(recipe, numel, dtype, block_size)
        return _difference(recipe, numel, shape, dtype, units, block_size)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _units_by_size(recipe: Recipe, numel: int, dtype: torch.dtype, block_size: int) -> Units:
    """Compare the state of a tensor with that of one that is larger, or smaller, by a block."""
    known = _shapes(recipe, numel, dtype)
    for other in (numel + block_size, numel - block_size):
        its = _shapes(recipe, other, dtype)
        if {key: (len(s), s[1:]) for key, s in known.items()} == {
            key: (len(s), s[1:]) for key, s in its.items()
        }:
            return {key: abs(sum(s[:1]) - sum(its[key][:1])) for key, s in known.items()}
    raise UnsupportedError(f"its state of {numel} elements is unlike that of a block more or less")


def _shapes(recipe: Recipe, numel: int, dtype: torch.dtype) -> dict[str, torch.Size]:
    param = nn.Parameter(torch.zeros(numel, dtype=dtype))
    param.grad = torch.zeros_like(param)
    with isolated():
        optimizer = recipe.made([param])
        step_without_hooks(optimizer)
    state = unwrapped(optimizer.state.get(param, {}))
    return {key: getattr(value, "shape", torch.Size()) for key, value in state.items()}


def _difference(
    recipe: Recipe, numel: int, shape: Shape, dtype: torch.dtype, units: Units, block_size: int
) -> str:
    """Step a tensor in full and in pieces; return what differs, if something does."""
    many = -(-numel // block_size)
    starts = sorted({0, block_size, block_size * ((many + 1) // 2)} - {many * block_size})
    stops = [*starts[1:], numel]
    dims = (*(1 for _ in shape[1:]), numel)  # as many as the parameter's
    full = nn.Parameter(_values(numel, 0, block_size).to(dtype).view(dims))
    flat = full.detach().view(-1)
    with isolated():
        inner = Inner(recipe.optimizer_class, safe_options(recipe.kwargs))
        groups: Any = [{**safe_group_options(recipe.options), "params": []}]
        reference = recipe.made([full])
        pieces = [
            _Piece(BlockPiece(start, stop - start, numel, block_size), flat[start:stop].clone())
            for start, stop in zip(starts, stops, strict=True)
        ]
        groups[0] = {**inner.converted(groups[0]), "params": []}
        inner.set_runs(groups, [pieces])
        for step in range(_STEPS):
            grad = _values(numel, step + 1, block_size).to(dtype)
            full.grad = grad.view(dims).clone()
            step_without_hooks(reference)
            for one in pieces:
                one.tensor.grad = grad[one.piece.start :][: one.piece.numel].clone()
            first = [First(one, one.piece, units) for one in pieces] if not step else []
            with widened(inner, first):
                for one in pieces if inner.is_eager and not step else ():
                    inner.set_state(one, inner.first_state(one, groups[0]))
                inner.step(groups, {})
    return _compared(full, reference.state[full], inner, pieces, units)


def _compared(
    full: Tensor, state: Mapping[str, Any], inner: Inner, pieces: Sequence[_Piece], units: Units
) -> str:
    together = torch.cat([one.tensor.detach() for one in pieces])
    if not torch.equal(together, full.detach().view(-1)):
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


def _values(numel: int, seed: int, block_size: int) -> Tensor:
    """Return values whose largest differ from block to block."""
    number = torch.arange(numel, device="cpu") // max(1, block_size // 4)
    return values_like((numel,), seed) * (1 + number % 7) ** 2


class BlockPiece(NamedTuple):
    """Elements of a parameter, begun at a multiple of ``block_size``.

    Attributes:
        start: the elements of the parameter before it.
        numel: its elements.
        full: the elements of the parameter.
        block_size: elements of a block, or of several.
    """

    start: int
    numel: int
    full: int
    block_size: int

    @property
    def wide(self) -> int:
        """Elements of the tensor within which it is stepped for the first time."""
        return padded_numel(self.numel, self.full, self.block_size)

    @property
    def front(self) -> int:
        """How many of these are before it: the last piece comes last, it may end in a block."""
        return self.wide - self.numel if self.start + self.numel == self.full else 0

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
        first = self.front // self.block_size * unit
        stop = None if self.front else first + -(-self.numel // self.block_size) * unit
        return value[first:stop].clone()


class _Piece:
    """A piece of a trial."""

    def __init__(self, piece: BlockPiece, own: Tensor) -> None:
        self.piece, self.tensor = piece, nn.Parameter(own)


class First(NamedTuple):
    """A piece that has no state yet, with the tensor that is stepped."""

    run: Steppable
    piece: BlockPiece
    units: Units


@contextmanager
def widened(inner: Inner, pieces: Sequence[First]) -> Iterator[None]:
    """Widen pieces while they are stepped for the first time; memory and gradients are bound."""
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
