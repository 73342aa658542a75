"""What the engine asks of the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """A collective that was started.

    ``wait`` makes its result usable on the current stream (on a CPU: blocks) and must be called
    exactly once; until then the caller keeps both tensors alive and untouched.
    """

    def wait(self) -> object:
        """Make the result usable."""


class Done:
    """A collective that had nothing to do."""

    def wait(self) -> None:
        """Return at once."""


class Together:
    """Several collectives that complete together."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def wait(self) -> None:
        """Make all results usable."""
        for part in self._parts:
            part.wait()


@dataclass
class Label:
    """What collectives are for, which ranks compare; whoever made it may change what it says."""

    text: str = ""
    """Equal on all ranks, but for those that do something else; empty: nothing is compared."""


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
        """Whether reductions add up in fp32 or wider, whatever dtype travels."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, if there is one."""

    def by_sums(self) -> Collectives:
        """The same, but with means made from sums: for backends whose own means are slow."""

    def labelled(self, label: Label) -> Collectives:
        """The same, but for what ``label`` says: other ranks' labels must say that too.

        A ``ProtocolError`` tells ranks whose labels differ in a collective, at its start or in
        ``wait``; some wires compare the first collective of each text only, or none.
        """

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """Start to gather every rank's ``sources[i]`` (1-D, n elements) into ``outputs[i]`` (1-D,
        world * n elements), in rank order. A source may be its own place in its output.
        """

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """Start to put the mean over ranks of slice ``rank`` of ``source`` (1-D, world * n
        elements) into ``output`` (1-D, n elements). ``source`` may be overwritten.
        """

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """Start to replace ``values`` (1-D) by their mean over ranks, the same bits on all."""

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """Start to replace ``values`` (contiguous) by what they are on rank ``source``."""


@dataclass(frozen=True)
class Around:
    """What wrappers have in common: they are a group as ``inner`` is, and pass everything on."""

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
        """That of ``inner``."""
        return self.inner.adds_wide

    @property
    def group(self) -> dist.ProcessGroup | None:
        """That of ``inner``."""
        return self.inner.group

    def by_sums(self) -> Collectives:
        """The same around ``inner`` by sums."""
        return replace(self, inner=self.inner.by_sums())

    def labelled(self, label: Label) -> Collectives:
        """The same around ``inner`` with a label."""
        return replace(self, inner=self.inner.labelled(label))

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """As ``inner`` does."""
        return self.inner.all_gather(outputs, sources)

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """As ``inner`` does."""
        return self.inner.reduce_scatter_mean(output, source)

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """As ``inner`` does."""
        return self.inner.all_reduce_mean(values)

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """As ``inner`` does."""
        return self.inner.broadcast(values, source)


class Alone:
    """A group of one."""

    rank = 0
    world = 1
    adds_wide = True
    group = None

    def by_sums(self) -> Collectives:
        """This one."""
        return self

    def labelled(self, label: Label) -> Collectives:
        """This one: there is nobody to compare with."""
        return self

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """Copy what is not in its place."""
        for output, source in zip(outputs, sources, strict=True):
            put(source, output)
        return Done()

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """Copy, or cast."""
        output.copy_(source)
        return Done()

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """Nothing to do."""
        return Done()

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """Nothing to do."""
        return Done()


def put(source: Tensor, place: Tensor) -> None:
    """Copy ``source`` to its place, unless it is there."""
    if source.data_ptr() != place.data_ptr():
        place.copy_(source)


def as_real(values: Tensor) -> Tensor:
    """``values``, 1-D; complex ones as twice as many real numbers, as no backend carries others."""
    return torch.view_as_real(values).view(-1) if values.is_complex() else values
