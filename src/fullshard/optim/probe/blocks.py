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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fullshard._torch import autograd as _autograd
from fullshard.errors import UnsupportedError
from fullshard.optim.inner import Inner, Steppable, step_without_hooks
from fullshard.optim.probe.probe import LARGE, Probe, Shape, values_like
from fullshard.optim.probe.subclasses import held_by, rebuilt, unwrapped

Units = dict[str, int]
"""By name of the state: how many of it, counted on the first dim, belong to a block."""

_STEPS = 3


def padded_numel(numel: int, full: int, block_size: int) -> int:
    """Return how large a tensor must be that a class treats as one of ``full`` elements.

    At least ``numel``, at most ``full``, equal to it modulo ``block_size``.
    """
    least = max(numel, min(full, max(LARGE, 2 * block_size)))
    return least + (full - least) % block_size


def units_of(
    probe: Probe, shape: Shape, dtype: torch.dtype, block_size: int, *, is_vouched_for: bool
) -> Units:
    """Return how much of each state belongs to a block, having tried that blocks are independent.

    Args:
        probe: the class.
        shape: of the full parameter.
        dtype: its dtype.
        block_size: elements of a block, or of several.
        is_vouched_for: believe that pieces step as they do within the full tensor.

    Raises:
        UnsupportedError: a piece, begun at a multiple of ``block_size``, steps unlike the same
            elements of the full tensor, or has other state.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return {}  # no gradient, and so no state
    numel = padded_numel(0, torch.Size(shape).numel(), block_size)

    def trial() -> Units:
        small = min(4 * block_size, numel)  # may show a difference at less cost
        for size in () if is_vouched_for else (small, numel):
            try:
                units = _units_by_size(probe, size, dtype, block_size)
                reason = _difference(probe, size, len(shape), dtype, units, block_size)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            if reason:
                raise probe.refusal("blocks", shape=shape, block_size=block_size, reason=reason)
        return _units_by_size(probe, numel, dtype, block_size)

    return probe.once(("units", numel, len(shape), dtype, block_size, is_vouched_for), trial)


def _units_by_size(probe: Probe, numel: int, dtype: torch.dtype, block_size: int) -> Units:
    """Compare the state of a tensor with that of one that is larger, or smaller, by a block."""
    known = _shapes(probe, numel, dtype)
    for other in (numel + block_size, numel - block_size):
        its = _shapes(probe, other, dtype)
        if {key: (len(s), s[1:]) for key, s in known.items()} == {
            key: (len(s), s[1:]) for key, s in its.items()
        }:
            return {key: abs(sum(s[:1]) - sum(its[key][:1])) for key, s in known.items()}
    raise UnsupportedError(f"its state of {numel} elements is unlike that of a block more or less")


def _shapes(probe: Probe, numel: int, dtype: torch.dtype) -> dict[str, torch.Size]:
    param = nn.Parameter(torch.zeros(numel, dtype=dtype))
    param.grad = torch.zeros_like(param)
    optimizer = probe.made([param])
    step_without_hooks(optimizer)
    state = unwrapped(optimizer.state.get(param, {}))
    return {key: getattr(value, "shape", torch.Size()) for key, value in state.items()}


def _difference(
    probe: Probe, numel: int, ndim: int, dtype: torch.dtype, units: Units, block_size: int
) -> str:
    """Step a tensor in full and in pieces; return what differs, if something does."""
    many = -(-numel // block_size)
    starts = sorted({0, block_size, block_size * ((many + 1) // 2)} - {many * block_size})
    stops = [*starts[1:], numel]
    dims = (*(1 for _ in range(ndim - 1)), numel)  # as many as the parameter's
    full = nn.Parameter(_values(numel, 0, block_size).to(dtype).view(dims))
    flat = full.detach().view(-1)
    inner = Inner(probe.optimizer_class, probe.kwargs)
    groups: Any = [{**inner.converted(probe.options), "params": []}]
    reference = probe.made([full])
    pieces = [
        First(
            Steppable(flat[start:stop]), BlockPiece(start, stop - start, numel, block_size), units
        )
        for start, stop in zip(starts, stops, strict=True)
    ]
    inner.set_runs(groups, [one.run for one in pieces])
    for step in range(_STEPS):
        grad = _values(numel, step + 1, block_size).to(dtype)
        full.grad = grad.view(dims).clone()
        step_without_hooks(reference)
        for one in pieces:
            one.run.tensor.grad = grad[one.piece.start :][: one.piece.numel].clone()
        with widened(inner, [] if step else pieces):
            for run, _, _ in pieces if inner.is_eager and not step else ():
                inner.set_state(run, inner.first_state(run, groups[0]))
            inner.step(groups, {})
    return _compared(full, reference.state[full], inner, pieces)


def _compared(full: Tensor, state: Mapping[str, Any], inner: Inner, pieces: Sequence[First]) -> str:
    together = torch.cat([one.run.tensor.detach() for one in pieces])
    if not torch.equal(together, full.detach().view(-1)):
        return "parameters differ"
    own = [unwrapped(inner.state_of(one.run) or {}) for one in pieces]
    for key, value in unwrapped(state).items():
        if not isinstance(value, Tensor):
            if any(one[key] != value for one in own):
                return f"state {key!r} differs"
            continue
        parts = [one[key] for one in own] if pieces[0].units[key] else [own[0][key]]
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
        """Return the piece, extended by zeros."""
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
