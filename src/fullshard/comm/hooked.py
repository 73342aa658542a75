"""Reductions by a function of the user's, as ``register_comm_hook`` of PyTorch's FSDP1 takes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fullshard.comm.protocol import Around, Done, Pending


@dataclass(frozen=True)
class HookedShards(Around):
    """``inner``, but gradients are reduced by ``hook(state, all_slices, own_slice)``.

    Behind the ``numel`` elements of each slice are flags of ours, which ``inner`` reduces: the
    hook does not see them. What it writes counts as it is, nothing is divided.
    """

    state: Any
    hook: Callable[..., object]
    numel: int

    @property
    def adds_wide(self) -> bool:
        """The hook gets what the dtype of reduction says."""
        return False

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """Let the hook write ``output``, all but its flags."""
        rows = source.view(self.world, -1)
        reduced = source.new_zeros(self.numel)
        self.hook(self.state, rows[:, : self.numel].reshape(-1), reduced)
        output[: self.numel].copy_(reduced)
        flags = source.new_empty(rows.shape[1] - self.numel)
        pending = self.inner.reduce_scatter_mean(flags, rows[:, self.numel :].reshape(-1))
        return _Copied(pending, output[self.numel :], flags)


@dataclass(frozen=True)
class HookedCopies(HookedShards):
    """The same where every rank has all elements: ``hook(state, gradient)`` works in place.

    ``inner`` is the wire among these ranks; to the engine this is a group of one.
    """

    @property
    def rank(self) -> int:
        """Nothing is cut."""
        return 0

    @property
    def world(self) -> int:
        """Nothing is cut."""
        return 1

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """Let the hook write ``output``, all but its flags."""
        gradient = source[: self.numel].clone()
        self.hook(self.state, gradient)  # which may give it other ``data``
        flags = source[self.numel :].clone()
        output[: self.numel].copy_(gradient)
        return _Copied(self.inner.all_reduce_mean(flags), output[self.numel :], flags)


@dataclass(frozen=True)
class Settled(Around):
    """The wire among copies that a hook has reduced over already."""

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """Nothing is left to do."""
        return Done()


@dataclass(frozen=True)
class _Copied:
    pending: Pending
    output: Tensor
    received: Tensor

    def wait(self) -> None:
        self.pending.wait()
        self.output.copy_(self.received)
