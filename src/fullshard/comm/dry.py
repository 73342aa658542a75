"""A world of many ranks in one process: collectives are told or imitated, and nothing is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from fullshard._torch import world as _world
from fullshard.comm.mesh import choose_wire
from fullshard.comm.protocol import Done, Label, Pending, put


class Exchange(NamedTuple):
    """One collective of a dry run."""

    what: str
    """The name of the method of ``Collectives``: "all_gather", ..."""
    ranks: tuple[int, ...]
    """The ranks of the group, by their numbers in the world."""
    nbytes: int
    """Bytes of all ranks' parts together (of the values, in means of whole values)."""

    @property
    def received_nbytes(self) -> int:
        """Bytes that this rank has to receive at least; it sends as many."""
        world = len(self.ranks)
        others = self.nbytes * (world - 1) // world
        return 2 * others if self.what == "all_reduce_mean" else others


Carrier = Callable[[Exchange], Pending]
"""Told of each collective when it starts; what it returns is waited for."""


@dataclass(frozen=True)
class DryWire:
    """The collectives of one group of a dry world."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    adds_wide: bool
    carry: Carrier

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return self.group.rank()

    @property
    def world(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    def by_sums(self) -> DryWire:
        """Return ``self``."""
        return self

    def over(self, group: dist.ProcessGroup) -> DryWire:
        """See ``Collectives.over``."""
        return replace(self, group=group)

    def labelled(self, label: Label) -> DryWire:
        """Return ``self``, since there is no other rank to compare labels with."""
        return self

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """Tell that outputs were to be gathered."""
        return self._tell("all_gather", sum(output.nbytes for output in outputs))

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """Tell that ``source`` was to be reduced."""
        return self._tell("reduce_scatter_mean", source.nbytes)

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """Tell that ``values`` were to be reduced."""
        return self._tell("all_reduce_mean", values.nbytes)

    def all_to_all(self, output: Tensor, source: Tensor) -> Pending:
        """Tell that slices of ``source`` were to be exchanged."""
        return self._tell("all_to_all", source.nbytes)

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """Tell that ``values`` were to be sent to all."""
        return self._tell("broadcast", values.nbytes)

    def _tell(self, what: str, nbytes: int) -> Pending:
        return self.carry(Exchange(what, self.ranks, nbytes))


@dataclass(frozen=True)
class MirrorWire(DryWire):
    """The collectives of a group whose ranks are all taken to hold what this rank holds.

    Results are written by copies on the current stream, and are complete at once.
    """

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """Copy each source to every rank's part of its output."""
        for output, source in zip(outputs, sources, strict=True):
            parts = output.view(self.world, -1)
            put(source, parts[self.rank])
            for others in (parts[: self.rank], parts[self.rank + 1 :]):
                if len(others):
                    others.copy_(source.expand_as(others))
        return super().all_gather(outputs, sources)

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """Copy this rank's slice of ``source``, the mean of equal ones."""
        put(source.view(self.world, -1)[self.rank], output)
        return super().reduce_scatter_mean(output, source)

    def all_to_all(self, output: Tensor, source: Tensor) -> Pending:
        """Copy this rank's slice of ``source`` to all of ``output``."""
        parts = output.view(self.world, -1)
        parts.copy_(source.view(self.world, -1)[self.rank].expand_as(parts))
        return super().all_to_all(output, source)


def is_dry() -> bool:
    """Return whether this is inside of ``dry_world`` or ``mirror_world``."""
    return _device_type.get() is not None


def played_by(device_type: str) -> str:
    """Return ``device_type``; in a dry world, the device type of its hardware."""
    return _device_type.get() or device_type


world_lock = threading.RLock()
"""Held in ``dry_world``, and by threads for as long as they need the process groups that exist."""

_device_type: ContextVar[str | None] = ContextVar("fullshard_dry", default=None)


@contextmanager
def dry_world(
    size: int,
    rank: int = 0,
    *,
    carry: Carrier = lambda exchange: Done(),
    adds_wide: bool = True,
    device_type: str = "cpu",
) -> Iterator[None]:
    """Make this process rank ``rank`` of ``size`` ranks in the block, without any other process.

    The existing process groups are restored afterwards. No other thread may use
    ``torch.distributed`` in the meantime, unless it holds ``world_lock``.

    Args:
        size: the number of ranks.
        rank: the rank of this process.
        carry: called with each collective, instead of running it.
        adds_wide: the ``adds_wide`` of the collectives.
        device_type: the device type that the CPUs in the meshes of this world stand for.
    """
    make = partial(DryWire, adds_wide=adds_wide, carry=carry)
    with _other_world(size, rank, make, device_type, serves="cpu"):
        yield


@contextmanager
def mirror_world(
    size: int, rank: int = 0, *, adds_wide: bool = True, device_type: str = "cpu"
) -> Iterator[None]:
    """Be rank ``rank`` of ``size`` ranks in the block, each of which does what this one does.

    As in ``dry_world``, but collectives have results (``MirrorWire``), and the meshes are those of
    devices of ``device_type``, so that real models can run.
    """
    make = partial(MirrorWire, adds_wide=adds_wide, carry=lambda exchange: Done())
    with _other_world(size, rank, make, device_type, serves=device_type):
        yield


@contextmanager
def _other_world(
    size: int, rank: int, make: Callable[..., DryWire], device_type: str, *, serves: str
) -> Iterator[None]:
    def wire(group: dist.ProcessGroup, device_type: str) -> DryWire:
        return make(group, tuple(dist.get_process_group_ranks(group)))

    token = _device_type.set(device_type)
    try:
        with world_lock, _world.other_world(size, rank, serves):
            before = choose_wire(wire)
            try:
                yield
            finally:
                choose_wire(before)
    finally:
        _device_type.reset(token)
