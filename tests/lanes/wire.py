"""A wire that books what each collective does, on a timeline of its process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fullshard.comm import Pending
from fullshard.comm.protocol import Wrapper
from tests.lanes.clocks import Flight, Timeline
from tests.lanes.places import here

if TYPE_CHECKING:
    from tests.lanes.checker import Checker


@dataclass(frozen=True)
class TracedWire(Wrapper):
    """``inner``, as NCCL runs it: on a stream of its own, which waits for the lane that issues.

    The stream is the process group's, so collectives of one group come one after another. With
    ``in_order`` they run on the stream that is current instead, and waiting orders nothing.
    """

    checker: Checker
    timeline: Timeline
    in_order: bool = False

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """Reads what each rank has, writes what all have."""
        traced = self._start(reads=sources, writes=outputs)
        with self.checker.booking.suspended():
            return traced.with_(super().all_gather(outputs, sources))

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """Reduce; the source may be overwritten, and the wait casts a result of another dtype."""
        casts = output.dtype != source.dtype
        traced = self._start(reads=(), writes=[source] if casts else [source, output])
        with self.checker.booking.suspended():
            pending = super().reduce_scatter_mean(output, source)
        return traced.with_(pending, cast_to=output if casts else None)

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """In place."""
        traced = self._start(reads=(), writes=[values])
        with self.checker.booking.suspended():
            return traced.with_(super().all_reduce_mean(values))

    def all_to_all(self, output: Tensor, source: Tensor) -> Pending:
        """Reads one, writes the other."""
        traced = self._start(reads=[source], writes=[output])
        with self.checker.booking.suspended():
            return traced.with_(super().all_to_all(output, source))

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """In place; the rank that sends reads only."""
        sends = source == self.rank
        traced = self._start(reads=[values] if sends else (), writes=() if sends else [values])
        with self.checker.booking.suspended():
            return traced.with_(super().broadcast(values, source))

    def _start(self, *, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> _Traced:
        checker, flight = self.checker, Flight()
        wire = checker.accelerator.current if self.in_order else self.timeline
        wire.join(checker.accelerator.current.clock)
        on_host = [
            t for t in (*reads, *writes) if t.numel() and checker.booking.block_of(t).on_host
        ]
        if on_host:  # what a device would have been sent before, and sent back after
            checker.trace.host.join(checker.accelerator.current.clock)
        tick, place = checker.trace.issue(wire), here()
        for tensors, is_written in ((reads, False), (writes, True)):
            for tensor in tensors:
                booked = None if any(tensor is one for one in on_host) else flight
                checker.booking.touch(tensor, wire, tick, place, writes=is_written, flight=booked)
        if not self.in_order:
            flight.clock = dict(wire.clock)
        if on_host:
            checker.trace.host.join(wire.clock)
        return _Traced(checker, flight)


@dataclass
class _Traced:
    """A collective in flight."""

    checker: Checker
    flight: Flight
    pending: Pending | None = None
    cast_to: Tensor | None = None

    def with_(self, pending: Pending, cast_to: Tensor | None = None) -> _Traced:
        """Know what really goes on."""
        self.pending, self.cast_to = pending, cast_to
        return self

    def wait(self) -> object:
        """The current lane waits."""
        assert self.pending is not None
        with self.checker.booking.suspended():
            result = self.pending.wait()
        lane = self.checker.accelerator.current
        lane.join(self.flight.clock)
        self.flight.is_open = False
        if self.cast_to is not None:
            tick = self.checker.trace.issue(lane)
            self.checker.booking.touch(self.cast_to, lane, tick, here(), writes=True)
        return result
