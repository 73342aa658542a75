"""An accelerator whose streams and events carry vector clocks, in the place of ``torch.cuda``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.graph import Node

from tests.lanes.clocks import Clock, Timeline, Trace
from tests.lanes.nodes import Backward, current_node


class Stream:
    """A stream of the fake accelerator; its work is done when it is issued."""

    def __init__(self, trace: Trace, name: str) -> None:
        self.timeline = Timeline(name, computes=True)
        self._trace = trace

    def wait_event(self, event: Event) -> None:
        """See ``torch.cuda.Stream``; an event that was never recorded is over."""
        self.timeline.join(self._trace.host.clock)
        self.timeline.join(event.clock)

    def wait_stream(self, other: Stream) -> None:
        """See ``torch.cuda.Stream``."""
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """See ``torch.cuda.Stream``."""
        event = event or Event(self._trace)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Block the host."""
        self._trace.host.join(self.timeline.clock)


class Event:
    """A point on a stream: a copy of its clock."""

    def __init__(self, trace: Trace) -> None:
        self.clock: Clock = {}
        self._trace = trace

    def record(self, stream: Stream) -> None:
        """See ``torch.cuda.Event``."""
        self.clock = dict(stream.timeline.clock)

    def synchronize(self) -> None:
        """Block the host."""
        self._trace.host.join(self.clock)

    def query(self) -> bool:
        """Return True: all work is over at once. The answer orders nothing."""
        return True

    def elapsed_time(self, later: Event) -> float:
        """Return 0: nothing takes time here."""
        return 0.0


class Accelerator:
    """The part of ``torch.cuda`` that ``StreamLanes`` and programs with own streams use."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.default = Stream(trace, "compute")
        self.backward = Backward(self.default)
        self._of_thread = threading.local()
        self._num_streams = 0

    @property
    def _stack(self) -> list[tuple[Stream, Node | None]]:
        """The streams that this thread has made current, each with the node that it was in."""
        stack: list[tuple[Stream, Node | None]] = self._of_thread.__dict__.setdefault(
            "stack", [(self.default, None)]
        )
        return stack

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:
        """A new stream."""
        self._num_streams += 1
        return Stream(self.trace, f"stream {self._num_streams}")

    def Event(self, enable_timing: bool = False) -> Event:
        """A new event."""
        return Event(self.trace)

    def current_stream(self, device: Any = None) -> Stream:
        """The stream that work is issued on; in backward that of the node, unless set there."""
        node = current_node()
        stream, where = self._stack[-1]
        of_node = self.backward.runs(node, stream)
        if where is not node and of_node is not None:
            stream = of_node
        self.backward.made_on(stream)
        return stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Issue the work of the block on ``stream``."""
        self.current_stream()
        self._stack.append((stream, current_node()))
        try:
            yield
        finally:
            self.current_stream()
            self._stack.pop()

    @property
    def current(self) -> Timeline:
        """The timeline that work is issued on."""
        return self.current_stream().timeline
