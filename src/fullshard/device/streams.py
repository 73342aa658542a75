"""Lanes: the roles of streams on a device, and how one lane waits for another.

    COMPUTE         the user's computation: usually one stream, the current one. For a model that
                    uses several, every stream that units ran on since ``untrack_streams``
    GATHER          casts, all-gathers and copies that make unsharded parameters; owns their memory
    REDUCE          reduce-scatters and the work after them; owns the memory of sharded gradients
    HOST_TO_DEVICE  copies of shards from the host, so that no unit waits for the copies of later
                    units; in an optimizer's own lanes, copies of its state
    DEVICE_TO_HOST  copies of optimizer state to the host

Memory is handed from lane to lane by ``join``, never by ``record_stream``: with ``record_stream``,
the time of reuse would depend on the speed of the device.

Collectives run beside the lane that starts them, on one stream per lane and process group
(``wire``). So a copy on a lane waits for the collectives that it needs, but not for later ones.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fullshard._torch import device as _device
from fullshard.comm import Collectives, Encoded, Pending, Then, Wrapper


class Lane(enum.StrEnum):
    """The role of a stream; see the docstring of this file."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"


class LaneEvent:
    """A point in the work of a lane that the host can wait for; on a CPU it is already reached."""

    def synchronize(self) -> object:
        """Block the host until the work before this point is done."""


class Stamp(Protocol):
    """The time at which a lane reached a point in its work."""

    def seconds_since(self, earlier: Any) -> float | None:
        """Return the seconds from ``earlier`` to this stamp; None until both are reached.

        The call never blocks.
        """


class Reading(NamedTuple):
    """A stamp of a lane whose time is known when the stamp is made."""

    at_s: float

    def seconds_since(self, earlier: Reading) -> float:
        """Return the seconds between the two."""
        return self.at_s - earlier.at_s


class _EventStamp(NamedTuple):
    event: Any

    def seconds_since(self, earlier: _EventStamp) -> float | None:
        """Return the seconds between the two events, or None until the device has passed both."""
        if not (self.event.query() and earlier.event.query()):
            return None
        seconds: float = earlier.event.elapsed_time(self.event) / 1e3
        return seconds


class Lanes:
    """The lanes of one device; this class has those of a CPU, on which all work runs in order.

    So on a CPU there are no streams to switch or wait for: work that was issued is done.
    """

    def __init__(self) -> None:
        self._here: AbstractContextManager[None] = nullcontext()
        self._waited_s = 0.0

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        """Issue the work of the ``with`` block on ``lane`` (not COMPUTE)."""
        return self._here

    def track_stream(self) -> None:
        """Add the current stream to the streams of COMPUTE, because it runs computation."""

    def untrack_streams(self) -> None:
        """Remove all streams except the current one from COMPUTE: no later work waits for them."""

    def join(self, waiter: Lane, awaited: Lane) -> None:
        """Make later work on ``waiter`` wait for all work issued so far on ``awaited``.

        If both are COMPUTE, the streams of COMPUTE wait for each other.
        """

    def wire(self, lane: Lane, comm: Collectives) -> Collectives:
        """Return collectives like ``comm`` that run beside ``lane``; use them on this lane only."""
        return comm

    def wait(self, pending: Pending) -> None:
        """Make later work on the current lane wait for a collective."""
        start = time.perf_counter()
        pending.wait()
        self._waited_s += time.perf_counter() - start

    def on_user_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Issue the work of the ``with`` block on the user's ``stream``; None: on the current one.

        ``stream`` waits for work issued before the block, and later work waits for ``stream``.
        """
        return self._here

    def wait_event(self, lane: Lane, event: Any) -> None:
        """Make later work on ``lane`` wait for the user's ``event``."""

    def mark(self) -> LaneEvent:
        """Return a point after all work issued so far on the current lane."""
        return LaneEvent()

    def stamp(self, lane: Lane) -> Stamp:
        """Return a stamp after all work issued so far on ``lane`` (COMPUTE: the current stream)."""
        return Reading(time.perf_counter())

    def read(self, values: Sequence[Tensor]) -> list[list[float]]:
        """Return the elements of each of ``values``, 1-D tensors that the current lane writes.

        The host blocks once, until all elements are available.
        """
        return [one.tolist() for one in values]

    def waited_s(self) -> float:
        """Return the seconds that COMPUTE has waited for communication.

        Streams count from the first call on, and only waits that have ended. The call never blocks.
        """
        return self._waited_s


@dataclass(frozen=True)
class OnStream(Wrapper):
    """The collectives of ``inner``, issued on ``stream``.

    A collective waits for the work issued so far on the current stream, and not for later work.
    ``wait`` waits for the event of that collective, and not for later collectives on ``stream``.
    Use ``stream`` from one lane only: otherwise memory that ``inner`` allocates and frees there
    could be reused while the lane still reads it.
    """

    accelerator: ModuleType
    device: torch.device
    stream: Any

    def _issue(self, start: Callable[[], Pending]) -> Pending:
        accelerator = self.accelerator
        ready = accelerator.Event()
        ready.record(accelerator.current_stream(self.device))
        self.stream.wait_event(ready)
        with accelerator.stream(self.stream):
            pending = start()
        done = accelerator.Event()
        done.record(self.stream)
        return Then(None, partial(self._end, done, pending))

    def _end(self, done: Any, pending: Pending) -> None:
        """Make the current stream wait for the collective, then let ``inner`` finish its part."""
        self.accelerator.current_stream(self.device).wait_event(done)
        pending.wait()


class StreamLanes(Lanes):
    """The lanes of an accelerator: streams, made through its ``torch.<device>`` module."""

    def __init__(self, accelerator: ModuleType, device: torch.device) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._device = device
        self._streams = {lane: self._new_stream() for lane in (Lane.GATHER, Lane.REDUCE)}
        self._computing: dict[Any, None] = {}  # the streams of COMPUTE, in the order first seen
        self._wires: WeakKeyDictionary[Any, dict[Lane, Any]] = WeakKeyDictionary()  # by group
        # Events around waits; None: not measured yet.
        self._waits: deque[tuple[Any, Any]] | None = None

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        """Make the lane's stream current."""
        stream: AbstractContextManager[Any] = self._accelerator.stream(self._stream(lane))
        return stream

    def track_stream(self) -> None:
        """Add the current stream to COMPUTE unless it belongs to another lane."""
        stream = self._current()
        if stream not in self._streams.values():
            self._computing[stream] = None

    def untrack_streams(self) -> None:
        """Remove all streams of COMPUTE except the current stream."""
        self._computing.clear()
        self.track_stream()

    def join(self, waiter: Lane, awaited: Lane) -> None:
        """Make every stream of ``waiter`` wait for a new event on each stream of ``awaited``."""
        waiting, behind = self._streams_of(waiter), self._streams_of(awaited)
        if waiting == behind and len(behind) == 1:
            return
        events = [self._recorded(stream) for stream in behind]
        is_wait = waiter is Lane.COMPUTE and awaited is not Lane.COMPUTE
        is_timed = is_wait and self._waits is not None
        for stream in waiting:
            with self._timing(stream) if is_timed else nullcontext():
                for event in events:
                    stream.wait_event(event)

    @contextmanager
    def _timing(self, stream: Any) -> Iterator[None]:
        assert self._waits is not None
        if _device.is_capturing(self._accelerator):  # captured events have no times
            yield
            return
        before = self._recorded(stream, enable_timing=True)
        yield
        self._waits.append((before, self._recorded(stream, enable_timing=True)))
        self._add_up()

    def wire(self, lane: Lane, comm: Collectives) -> Collectives:
        """Return ``comm`` on the stream of its group and ``lane``; as it is if it has no group."""
        if comm.group is None:
            return comm
        if isinstance(comm, Encoded):  # codecs run on the lane itself, collectives on the stream
            return replace(comm, inner=self.wire(lane, comm.inner))
        streams = self._wires.setdefault(comm.group, {})
        if lane not in streams:
            streams[lane] = self._new_stream()
        return OnStream(comm, self._accelerator, self._device, streams[lane])

    def wait(self, pending: Pending) -> None:
        """Make the current stream wait, without blocking the host."""
        pending.wait()

    @contextmanager
    def on_user_stream(self, stream: Any) -> Iterator[None]:
        """Make the two streams wait for each other before and after the block."""
        if stream is None:
            yield
            return
        here = self._current()
        stream.wait_stream(here)
        try:
            with self._accelerator.stream(stream):
                yield
        finally:
            here.wait_stream(stream)

    def wait_event(self, lane: Lane, event: Any) -> None:
        """Make every stream of ``lane`` wait for ``event``."""
        for stream in self._streams_of(lane):
            stream.wait_event(event)

    def mark(self) -> LaneEvent:
        """Return an event recorded on the current stream."""
        event: LaneEvent = self._recorded(self._current())
        return event

    def stamp(self, lane: Lane) -> Stamp:
        """Return a timing event, recorded on the lane's stream."""
        stream = self._current() if lane is Lane.COMPUTE else self._stream(lane)
        return _EventStamp(self._recorded(stream, enable_timing=True))

    def read(self, values: Sequence[Tensor]) -> list[list[float]]:
        """Copy all values that are on the device to the host in one blocking copy."""
        there = [one.float() for one in values if one.device.type != "cpu"]
        read = iter(torch.cat(there).cpu().split([len(one) for one in there]) if there else ())
        return [(one if one.device.type == "cpu" else next(read)).tolist() for one in values]

    def waited_s(self) -> float:
        """Return the sum of the seconds between the events around each wait of COMPUTE."""
        if self._waits is None:
            self._waits = deque()
        self._add_up()
        return self._waited_s

    def _add_up(self) -> None:
        """Add the waits that have ended to the sum, and drop their events."""
        waits = self._waits
        while waits and waits[0][1].query():
            before, after = waits.popleft()
            self._waited_s += before.elapsed_time(after) / 1e3

    def _recorded(self, stream: Any, **options: bool) -> Any:
        """Return a new event, recorded on ``stream``."""
        event = self._accelerator.Event(**options)
        event.record(stream)
        return event

    def _new_stream(self) -> Any:
        """Make a high-priority stream, so that communication does not queue behind computation."""
        return self._accelerator.Stream(device=self._device, priority=-1)

    def _current(self) -> Any:
        return self._accelerator.current_stream(self._device)

    def _streams_of(self, lane: Lane) -> list[Any]:
        if lane is not Lane.COMPUTE:
            return [self._stream(lane)]
        self.track_stream()
        return list(dict.fromkeys([*self._computing, self._current()]))

    def _stream(self, lane: Lane) -> Any:
        """Return the stream of a lane other than COMPUTE; the first call makes it."""
        if lane not in self._streams:
            self._streams[lane] = self._new_stream()
        return self._streams[lane]


def make_lanes(device: torch.device) -> Lanes:
    """Return the lanes of ``device``."""
    if device.type in ("cpu", "meta"):
        return Lanes()
    return StreamLanes(torch.get_device_module(device), device)
