"""Lanes: the four streams of work on a device, and how one waits for another.

    COMPUTE   what the user runs: as a rule one stream, the one that is current. All streams that
              units were seen on since the last ``rest`` together, where a model has several
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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fullshard.comm import Collectives, Pending
from fullshard.device.wires import Beside


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

    def see(self) -> None:
        """Computation runs on the stream that is current: from now on that is of COMPUTE."""

    def rest(self) -> None:
        """Nothing is left of computation that COMPUTE has to answer for but on this stream."""

    def join(self, waiter: Lane, awaited: Lane) -> None:
        """What is issued on ``waiter`` from now on waits for what was issued on ``awaited``.

        The streams of COMPUTE wait for each other if it is both.
        """

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

    def read(self, values: Sequence[Tensor]) -> list[list[float]]:
        """The numbers in each of ``values`` (1-D), written on the lane that is current.

        The host waits for them, once.
        """

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

    def see(self) -> None:
        """There is only one."""

    def rest(self) -> None:
        """There is only one."""

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

    def read(self, values: Sequence[Tensor]) -> list[list[float]]:
        """They are there."""
        return [one.tolist() for one in values]

    def waited_s(self) -> float:
        """Seconds in ``wait``."""
        return self._waited_s


class StreamLanes:
    """Streams of an accelerator, through its ``torch.<device>`` module."""

    def __init__(self, accelerator: ModuleType, device: torch.device) -> None:
        self._accelerator = accelerator
        self._device = device
        self._streams = {lane: self._new_stream() for lane in (Lane.GATHER, Lane.REDUCE)}
        self._computing: dict[Any, None] = {}  # the streams of COMPUTE, as they were seen
        self._wires: WeakKeyDictionary[Any, dict[Lane, Any]] = WeakKeyDictionary()  # by group
        self._waits: deque[tuple[Any, Any]] | None = None  # events around each, once asked for
        self._waited_s = 0.0

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        """Make the lane's stream current."""
        stream: AbstractContextManager[Any] = self._accelerator.stream(self._stream(lane))
        return stream

    def see(self) -> None:
        """Remember the current stream, unless it is one of ours."""
        stream = self._current()
        if stream not in self._streams.values():
            self._computing[stream] = None

    def rest(self) -> None:
        """Forget all but the current stream."""
        self._computing.clear()
        self.see()

    def join(self, waiter: Lane, awaited: Lane) -> None:
        """Record an event on each stream of ``awaited``, let each of ``waiter`` wait for it."""
        waiting, behind = self._streams_of(waiter), self._streams_of(awaited)
        if waiting == behind and len(behind) == 1:
            return
        events = []
        for stream in behind:
            event = self._accelerator.Event()
            event.record(stream)
            events.append(event)
        timed = waiter is Lane.COMPUTE and awaited is not Lane.COMPUTE and self._waits is not None
        for stream in waiting:
            with self._timing(stream) if timed else nullcontext():
                for event in events:
                    stream.wait_event(event)

    @contextmanager
    def _timing(self, stream: Any) -> Iterator[None]:
        assert self._waits is not None
        before, after = (self._accelerator.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        yield
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
        here = self._current()
        stream.wait_stream(here)
        with self._accelerator.stream(stream):
            yield
        here.wait_stream(stream)

    def wait_event(self, lane: Lane, event: Any) -> None:
        """Let the lane's stream wait."""
        for stream in self._streams_of(lane):
            stream.wait_event(event)

    def mark(self) -> Mark:
        """An event."""
        event: Mark = self._accelerator.Event()
        event.record(self._current())  # type: ignore[attr-defined]
        return event

    def read(self, values: Sequence[Tensor]) -> list[list[float]]:
        """Bring what is on the device to the host in one copy, which is waited for."""
        there = [one.float() for one in values if one.device.type != "cpu"]
        read = iter(torch.cat(there).cpu().split([len(one) for one in there]) if there else ())
        return [(one if one.device.type == "cpu" else next(read)).tolist() for one in values]

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

    def _current(self) -> Any:
        return self._accelerator.current_stream(self._device)

    def _streams_of(self, lane: Lane) -> list[Any]:
        if lane is not Lane.COMPUTE:
            return [self._stream(lane)]
        self.see()
        return list(dict.fromkeys([*self._computing, self._current()]))

    def _stream(self, lane: Lane) -> Any:
        """That of a lane of ours, made when it is used first."""
        if lane not in self._streams:
            self._streams[lane] = self._new_stream()
        return self._streams[lane]


def make_lanes(device: torch.device) -> Lanes:
    """The lanes of ``device``."""
    if device.type in ("cpu", "meta"):
        return CpuLanes()
    return StreamLanes(torch.get_device_module(device), device)
