"""The collectives that the engine needs, as a protocol, and its simplest implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """A collective that was started.

    ``wait`` makes the result usable on the current stream (on a CPU it blocks) and must be called
    exactly once. Until then the caller keeps inputs and outputs alive and unchanged.
    """

    def wait(self) -> object:
        """Make the result usable."""


class Done:
    """A collective that is already complete."""

    def wait(self) -> None:
        """Return at once."""


class Then:
    """A started collective, and a function to call once it has ended."""

    __slots__ = ("_finish", "_kept", "_pending")

    def __init__(
        self, pending: Pending | None, finish: Callable[[], object], *kept: object
    ) -> None:
        """``pending``: None if it has ended; ``kept``: kept alive until ``wait`` ends."""
        self._pending = pending
        self._finish = finish
        self._kept = kept

    def wait(self) -> None:
        """Wait for the collective, then call the function."""
        if self._pending is not None:
            self._pending.wait()
        self._finish()


class WorkGroup:
    """Several collectives that complete together."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def wait(self) -> None:
        """Make all results usable."""
        for part in self._parts:
            part.wait()


@dataclass
class Label:
    """The purpose of collectives, compared among ranks; its creator may change the text later."""

    text: str = ""
    """Equal on all ranks that run the same collective; if empty, nothing is compared."""


class Collectives(Protocol):
    """Collectives among the ranks of one process group."""

    @property
    def rank(self) -> int:
        """This process's number in the group."""

    @property
    def world(self) -> int:
        """Number of processes in the group."""

    @property
    def adds_wide(self) -> bool:
        """True if reductions add up in fp32 or wider, whatever dtype travels."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None if there is none."""

    def by_sums(self) -> Collectives:
        """Return the same collectives with means made from sums, for backends with slow means."""

    def over(self, group: dist.ProcessGroup) -> Collectives:
        """Return the same collectives over ``group``, a process group of the same ranks."""

    def labelled(self, label: Label) -> Collectives:
        """Return the same collectives for the purpose ``label``, which all ranks must agree on.

        Ranks whose labels differ get a ``ProtocolError`` when the collective starts or in ``wait``.
        Some implementations compare only the first collective of each text, or none.
        """

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """Start to gather every rank's ``sources[i]`` into ``outputs[i]``, in rank order.

        Sources (n elements) and outputs (world * n) are 1-D; a source may be part of its output.
        All sources have one dtype.
        """

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """Start to write the mean over ranks of slice ``rank`` of ``source`` into ``output``.

        ``source`` is 1-D with world * n elements and may be overwritten; ``output`` is 1-D with n.
        """

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """Start to replace ``values`` (1-D) by their mean over ranks, with equal bits on all."""

    def all_to_all(self, output: Tensor, source: Tensor) -> Pending:
        """Start to write slice ``rank`` of every rank's ``source`` into ``output``, in rank order.

        Both are contiguous, 1-D, of one dtype and size, and share no memory.
        """

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """Start to replace ``values`` (contiguous) by the values of rank ``source``."""


@dataclass(frozen=True)
class Wrapper:
    """A wrapper that forwards everything to ``inner``; subclasses override what they change."""

    inner: Collectives

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return self.inner.rank

    @property
    def world(self) -> int:
        """Number of processes in the group."""
        return self.inner.world

    @property
    def adds_wide(self) -> bool:
        """The value of ``inner``."""
        return self.inner.adds_wide

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of ``inner``."""
        return self.inner.group

    def by_sums(self) -> Collectives:
        """Return the same wrapper around ``inner.by_sums()``."""
        return replace(self, inner=self.inner.by_sums())

    def over(self, group: dist.ProcessGroup) -> Collectives:
        """Return the same wrapper around ``inner.over(group)``."""
        return replace(self, inner=self.inner.over(group))

    def labelled(self, label: Label) -> Collectives:
        """Return the same wrapper around ``inner.labelled(label)``."""
        return replace(self, inner=self.inner.labelled(label))

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """Forward to ``inner``."""
        return self._issue(partial(self.inner.all_gather, outputs, sources))

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """Forward to ``inner``."""
        return self._issue(partial(self.inner.reduce_scatter_mean, output, source))

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """Forward to ``inner``."""
        return self._issue(partial(self.inner.all_reduce_mean, values))

    def all_to_all(self, output: Tensor, source: Tensor) -> Pending:
        """Forward to ``inner``."""
        return self._issue(partial(self.inner.all_to_all, output, source))

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """Forward to ``inner``."""
        return self._issue(partial(self.inner.broadcast, values, source))

    def _issue(self, start: Callable[[], Pending]) -> Pending:
        """Start a collective of ``inner``; for subclasses that do something around each."""
        return start()


class SingleRank:
    """The collectives of a group of one rank."""

    rank = 0
    world = 1
    adds_wide = True
    group = None

    def by_sums(self) -> Collectives:
        """Return ``self``."""
        return self

    def over(self, group: dist.ProcessGroup) -> Collectives:
        """Return ``self``."""
        return self

    def labelled(self, label: Label) -> Collectives:
        """Return ``self``, since there is no other rank to compare labels with."""
        return self

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """Copy each source to its output unless it is already there."""
        for output, source in zip(outputs, sources, strict=True):
            put(source, output)
        return Done()

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """Copy ``source`` to ``output``, with a cast if the dtypes differ."""
        output.copy_(source)
        return Done()

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """Leave ``values`` as they are."""
        return Done()

    def all_to_all(self, output: Tensor, source: Tensor) -> Pending:
        """Copy ``source`` to ``output``."""
        output.copy_(source)
        return Done()

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """Leave ``values`` as they are."""
        return Done()


class Splits(NamedTuple):
    """The sizes of the slices of an exchange, for each rank of a group."""

    lengths: Sequence[int]
    """How many elements go to each rank."""
    sizes: Sequence[int]
    """How many come from each rank."""


def put(source: Tensor, place: Tensor) -> None:
    """Copy ``source`` to ``place`` unless both begin at the same address."""
    if source.data_ptr() != place.data_ptr():
        place.copy_(source)


def as_real(values: Tensor) -> Tensor:
    """Return 1-D ``values``, complex ones as twice as many reals: no backend carries complex."""
    return torch.view_as_real(values).view(-1) if values.is_complex() else values
