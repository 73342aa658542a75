"""The lanes of a dry run, which run no work and compute by clocks when it would be done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullshard._torch import memory as _memory
from fullshard.comm import Done, Exchange, Pending, Then
from fullshard.device.streams import Lane, LaneEvent, Lanes, Reading, Stamp


class LaneSpan(NamedTuple):
    """An interval of time on a lane, in seconds since the run began."""

    lane: str
    """A value of ``Lane``; or "wire" (a collective), "wait" (COMPUTE waits) or "host"."""
    start_s: float
    end_s: float
    what: str
    """The operation or the collective; for a wait of COMPUTE on a stream, the awaited lane."""


def dry_host_tensor(numel: int, dtype: torch.dtype) -> Tensor:
    """Return a 1-D meta tensor that a dry run counts as memory of the host."""
    with torch.inference_mode(False), _memory.no_dispatch():
        tensor = torch.empty(numel, dtype=dtype, device="meta")
    tensor.untyped_storage().at_home = True  # type: ignore[attr-defined]
    return tensor


def is_at_home(storage: torch.UntypedStorage) -> bool:
    """Return whether ``storage`` belongs to a ``dry_host_tensor``."""
    return getattr(storage, "at_home", False)


@dataclass(frozen=True)
class _Reached(LaneEvent):
    """The time at which a lane has done the work issued before."""

    lanes: DryLanes
    at_s: float

    def synchronize(self) -> None:
        """Advance the host's clock to this time."""
        self.lanes.now_s = max(self.lanes.now_s, self.at_s)


class DryLanes(Lanes):
    """Lanes that are clocks; collectives come to ``carry``, on the current lane.

    Work that is issued on a lane (``spend``) starts when the host has issued it and the lane has
    done all earlier work. The collectives of one lane and group start in order.

    Args:
        duration_s: returns the seconds that a collective takes.
        note: called with the interval of each operation, collective and wait.
        is_async: False if the host waits for all work that it issues, as on a CPU.
        in_background: False if a collective runs only while a lane waits for it.
        issue_s: seconds of the host to issue one operation.
    """

    def __init__(
        self,
        *,
        duration_s: Callable[[Exchange], float],
        note: Callable[[LaneSpan], None],
        is_async: bool = True,
        in_background: bool = True,
        issue_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.now_s = 0.0
        """The host's clock, in seconds since the run began."""
        self._duration_s = duration_s
        self._note = note
        self._is_async = is_async
        self._in_background = in_background
        self._issue_s = issue_s
        self._at_s: dict[Lane, float] = dict.fromkeys(Lane, 0.0)
        self._wire_at_s: dict[tuple[Lane, tuple[int, ...]], float] = {}
        self._lane = Lane.COMPUTE

    def spend(self, duration_s: float, what: str) -> None:
        """Issue work on the current lane that takes the device ``duration_s`` seconds."""
        self.now_s += self._issue_s
        start_s = max(self.now_s, self._at_s[self._lane])
        self._at_s[self._lane] = end_s = start_s + duration_s
        self._note(LaneSpan(self._lane, start_s, end_s, what))
        self._keep_up(end_s)

    def take_host(self, seconds: float, what: str = "") -> None:
        """Spend ``seconds`` of the host on other things than issuing operations.

        ``what`` is the name of the interval that is noted; empty: none is noted.
        """
        start_s, self.now_s = self.now_s, self.now_s + seconds
        if what:
            self._note(LaneSpan("host", start_s, self.now_s, what))

    def carry(self, exchange: Exchange) -> Pending:
        """Start a collective after the work issued so far on the current lane."""
        if len(exchange.ranks) == 1:
            return Done()
        took_s = self._duration_s(exchange)
        if not self._in_background:
            return Then(None, partial(self._arrive, exchange.what, 0.0, took_s))
        key = self._lane, exchange.ranks
        ready_s = max(self.now_s, self._at_s[self._lane])
        start_s = max(ready_s, self._wire_at_s.get(key, 0.0))
        self._wire_at_s[key] = end_s = start_s + took_s
        self._note(LaneSpan("wire", start_s, end_s, exchange.what))
        return Then(None, partial(self._arrive, exchange.what, end_s, 0.0))

    def _arrive(self, what: str, end_s: float, busy_s: float) -> None:
        """Make the current lane wait for a collective.

        Args:
            what: the collective.
            end_s: the time at which it ends, if it runs in the background.
            busy_s: the seconds that a wait takes to run it; 0: it runs in the background.
        """
        before_s = max(self.now_s, self._at_s[self._lane])
        end_s = before_s + busy_s if busy_s else max(before_s, end_s)
        if busy_s:
            self._note(LaneSpan("wire", before_s, end_s, what))
        self._at_s[self._lane] = end_s
        if not self._is_async:
            self._waited(before_s, end_s, what)
        self._keep_up(end_s)

    def end(self) -> float:
        """Make the host wait for all work and all collectives; return the time then."""
        self.now_s = max(self.now_s, *self._at_s.values(), *self._wire_at_s.values())
        self._at_s = dict.fromkeys(Lane, self.now_s)
        return self.now_s

    @property
    def computed_s(self) -> float:
        """The time at which COMPUTE has done all work issued so far."""
        return self._at_s[Lane.COMPUTE]

    def _keep_up(self, end_s: float) -> None:
        if not self._is_async:
            self.now_s = max(self.now_s, end_s)

    def _waited(self, start_s: float, end_s: float, what: str) -> None:
        if end_s > start_s:
            self._waited_s += end_s - start_s
            self._note(LaneSpan("wait", start_s, end_s, what))

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """See ``Lanes``."""
        before, self._lane = self._lane, lane
        try:
            yield
        finally:
            self._lane = before

    def join(self, waiter: Lane, awaited: Lane) -> None:
        """See ``Lanes``."""
        before_s, there_s = self._at_s[waiter], self._at_s[awaited]
        if there_s > before_s:
            self._at_s[waiter] = there_s
            if waiter is Lane.COMPUTE and self._is_async:
                self._waited(max(before_s, self.now_s), there_s, str(awaited))

    def wait(self, pending: Pending) -> None:
        """See ``Lanes``."""
        pending.wait()

    def wait_event(self, lane: Lane, event: Any) -> None:
        """Make ``lane`` wait if ``event`` is from ``mark``; ignore other events."""
        if isinstance(event, _Reached):
            self._at_s[lane] = max(self._at_s[lane], event.at_s)

    def mark(self) -> LaneEvent:
        """See ``Lanes``."""
        return _Reached(self, self._at_s[self._lane])

    def stamp(self, lane: Lane) -> Stamp:
        """Return the time at which ``lane`` has done the work issued so far."""
        return Reading(max(self.now_s, self._at_s[lane]))

    def read(self, values: Sequence[Tensor]) -> list[list[float]]:
        """Return ones, since meta tensors have no values."""
        return [[1.0] * value.numel() for value in values]
