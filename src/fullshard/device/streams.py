"""Lanes: the four streams of work on a device, and how one waits for another.

    COMPUTE   what the user runs; always the stream that is current
    GATHER    casts, all-gathers and copies that make unsharded parameters; owns their memory
    REDUCE    reduce-scatters and what follows them; owns the memory of the sharded gradients
    BUS       copies of shards from the host, so that nobody waits for those of later units

Memory is handed between lanes by ``join`` alone, never by ``record_stream``, so that what is
reused when does not depend on how fast the device happens to run.

Collectives run beside the lane that starts them, on a stream for each process group (``wire``), so
that a lane's copies wait for the collectives that they need, and not for later ones.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from fullshard.comm import Collectives, Pending
from fullshard.device.wires import Beside

__all__ = ["CpuLanes", "Lane", "Lanes", "Mark", "StreamLanes", "make_lanes"]


class Lane(enum.StrEnum):
    """A stream of work."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    BUS = "bus"


class Mark(Protocol):
    """A point in the work of a lane."""

    def synchronize(self) -> object:
        """Block the host until the work before it is done."""


class Lanes(Protocol):
    """The lanes of one device."""

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        """Issue the work of the ``with`` block on ``lane`` (not COMPUTE)."""

    def join(self, waiter: Lane, awaited: Lane) -> None:
        """What is issued on ``waiter`` from now on waits for what was issued on ``awaited``."""

    def wire(self, lane: Lane, comm: Collectives) -> Collectives:
        """``comm``, to be used on ``lane`` alone; what it starts runs beside the lane."""

    def wait(self, pending: Pending) -> None:
        """Make the result of a collective usable on the lane that is current."""

    def aside(self, stream: Any) -> AbstractContextManager[Any]:
        """Issue the work of the ``with`` block on the user's ``stream``, between that before and
        after it; None: where we are.
        """

    def wait_event(self, lane: Lane, event: Any) -> None:
        """What is issued on ``lane`` from now on waits for the user's ``event``."""

    def mark(self) -> Mark:
        """Where the lane that is current has got to."""

    def waited_s(self) -> float:
        """Seconds that COMPUTE has waited for communication; a stream counts from the first call.

        Of a stream, the waits that are over by now; the host waits for none.
        """


class _Past:
    """A point that has been passed."""

    def synchronize(self) -> None:
        """Return at once."""


class CpuLanes:
    """A CPU does one thing after the other: nothing to switch, nothing to wait for."""

    def __init__(self) -> None:
        self._here: AbstractContextManager[None] = nullcontext()
        self._waited_s = 0.0

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        """Stay here."""
        return self._here

    def join(self, waiter: Lane, awaited: Lane) -> None:
        """Everything issued before is done already."""

    def wire(self, lane: Lane, comm: Collectives) -> Collectives:
        """As it is."""
        return comm

    def wait(self, pending: Pending) -> None:
        """Block."""
        start = time.perf_counter()
        pending.wait()
        self._waited_s += time.perf_counter() - start

    def aside(self, stream: Any) -> AbstractContextManager[Any]:
        """Stay here."""
        return self._here

    def wait_event(self, lane: Lane, event: Any) -> None:
        """It is over."""

    def mark(self) -> Mark:
        """Everything issued before is done already."""
        return _Past()

    def waited_s(self) -> float:
        """Seconds in ``wait``."""
        return self._waited_s


class StreamLanes:
    """Streams of an accelerator, through its ``torch.<device>`` module."""

    def __init__(self, accelerator: ModuleType, device: torch.device) -> None:
        self._accelerator = accelerator
        self._device = device
        self._streams = {lane: self._new_stream() for lane in (Lane.GATHER, Lane.REDUCE)}
        self._wires: WeakKeyDictionary[Any, dict[Lane, Any]] = WeakKeyDictionary()  # by group
        self._waits: deque[tuple[Any, Any]] | None = None  # events around each, once asked for
        self._waited_s = 0.0

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        """Make the lane's stream current."""
        stream: AbstractContextManager[Any] = self._accelerator.stream(self._stream(lane))
        return stream

    def join(self, waiter: Lane, awaited: Lane) -> None:
        """Record an event on ``awaited``, let ``waiter`` wait for it."""
        event = self._accelerator.Event()
        event.record(self._stream(awaited))
        stream = self._stream(waiter)
        if self._waits is None or waiter is not Lane.COMPUTE:
            stream.wait_event(event)
            return
        before, after = (self._accelerator.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._waits.append((before, after))
        self._add_up()

    def wire(self, lane: Lane, comm: Collectives) -> Collectives:
        """On a stream for the group and the lane; of a group of one, as it is."""
        if comm.group is None:
            return comm
        streams = self._wires.setdefault(comm.group, {})
        if lane not in streams:
            streams[lane] = self._new_stream()
        return Beside(comm, self._accelerator, self._device, streams[lane])

    def wait(self, pending: Pending) -> None:
        """Let the current stream wait; the host goes on."""
        pending.wait()

    @contextmanager
    def aside(self, stream: Any) -> Iterator[None]:
        """Wait for each other before and after."""
        if stream is None:
            yield
            return
        here = self._stream(Lane.COMPUTE)  # whichever is current
        stream.wait_stream(here)
        with self._accelerator.stream(stream):
            yield
        here.wait_stream(stream)

    def wait_event(self, lane: Lane, event: Any) -> None:
        """Let the lane's stream wait."""
        self._stream(lane).wait_event(event)

    def mark(self) -> Mark:
        """An event."""
        event: Mark = self._accelerator.Event()
        event.record(self._stream(Lane.COMPUTE))  # type: ignore[attr-defined]
        return event

    def waited_s(self) -> float:
        """Between the events around each ``join`` of COMPUTE."""
        if self._waits is None:
            self._waits = deque()
        self._add_up()
        return self._waited_s

    def _add_up(self) -> None:
        """Count what is over, and keep no more events than the device is behind the host."""
        waits = self._waits
        while waits and waits[0][1].query():
            before, after = waits.popleft()
            self._waited_s += before.elapsed_time(after) / 1e3

    def _new_stream(self) -> Any:
        """High priority: communication that waits behind compute kernels overlaps with nothing."""
        return self._accelerator.Stream(device=self._device, priority=-1)

    def _stream(self, lane: Lane) -> Any:
        if lane is Lane.COMPUTE:
            return self._accelerator.current_stream(self._device)
        if lane not in self._streams:
            self._streams[lane] = self._new_stream()
        return self._streams[lane]


def make_lanes(device: torch.device) -> Lanes:
    """The lanes of ``device``."""
    if device.type in ("cpu", "meta"):
        return CpuLanes()
    return StreamLanes(torch.get_device_module(device), device)
