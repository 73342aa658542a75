"""Reductions by a user's hook of the kind that FSDP1's ``register_comm_hook`` accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fullshard.comm.protocol import Done, Pending, Then, Wrapper


@dataclass(frozen=True)
class HookedShards(Wrapper):
    """The collectives of ``inner``, but ``hook(state, all_slices, own_slice)`` reduces gradients.

    The ``numel`` elements of each slice are followed by presence flags. The hook does not see the
    flags: ``inner`` reduces them. The hook's result is used as it is and is not divided.
    """

    state: Any
    hook: Callable[..., object]
    numel: int

    @property
    def adds_wide(self) -> bool:
        """False: the hook receives gradients in the reduce dtype."""
        return False

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """Let the hook write ``output`` except for the flags."""
        rows = source.view(self.world, -1)
        reduced = source.new_zeros(self.numel)
        self.hook(self.state, rows[:, : self.numel].reshape(-1), reduced)
        output[: self.numel].copy_(reduced)
        flags = source.new_empty(rows.shape[1] - self.numel)
        pending = self.inner.reduce_scatter_mean(flags, rows[:, self.numel :].reshape(-1))
        return Then(pending, partial(output[self.numel :].copy_, flags))


@dataclass(frozen=True)
class HookedCopies(HookedShards):
    """Like ``HookedShards``, but every rank has all elements: ``hook(state, gradient)`` in place.

    ``inner`` connects these ranks; the engine sees a group of one rank.
    """

    @property
    def rank(self) -> int:
        """Always 0, since nothing is sharded."""
        return 0

    @property
    def world(self) -> int:
        """Always 1, since nothing is sharded."""
        return 1

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """Let the hook write ``output`` except for the flags."""
        gradient = source[: self.numel].clone()
        self.hook(self.state, gradient)  # may replace ``gradient.data``
        flags = source[self.numel :].clone()
        output[: self.numel].copy_(gradient)
        pending = self.inner.all_reduce_mean(flags)
        return Then(pending, partial(output[self.numel :].copy_, flags))


@dataclass(frozen=True)
class Settled(Wrapper):
    """A reduction over replicas that does nothing, because a hook has already reduced over them."""

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """Return a collective that is already done."""
        return Done()
