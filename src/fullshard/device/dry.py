"""The lanes of a dry run: nothing runs on them, and clocks tell when each would be done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.comm import Collectives, Done, Exchange, Pending
from fullshard.device.streams import Lane, LaneEvent, Reading, Stamp


class LaneSpan(NamedTuple):
    """A stretch of time on a lane, in seconds since the run began."""

    lane: str
    """A value of ``Lane``; "wire" for collectives, "wait" for a wait of COMPUTE, "host"."""
    start_s: float
    end_s: float
    what: str


def dry_host_tensor(numel: int, dtype: torch.dtype) -> Tensor:
    """Return a 1-D tensor on the meta device that stands for memory of the host."""
    with torch.inference_mode(False), _torch.no_dispatch():
        tensor = torch.empty(numel, dtype=dtype, device="meta")
    tensor.untyped_storage().at_home = True  # type: ignore[attr-defined]
    return tensor


def is_at_home(storage: torch.UntypedStorage) -> bool:
    """Return whether ``storage`` is that of a ``dry_host_tensor``."""
    return getattr(storage, "at_home", False)


class _Arriving(NamedTuple):
    """A collective that is done at a moment, or once somebody has waited for so long."""

    lanes: DryLanes
    end_s: float
    busy_s: float
    exchange: Exchange

    def wait(self) -> None:
        """Make the current lane wait."""
        self.lanes.arrive(self)


@dataclass(frozen=True)
class _Reached:
    lanes: DryLanes
    at_s: float

    def synchronize(self) -> None:
        """Let the host's clock go on to this moment."""
        self.lanes.now_s = max(self.lanes.now_s, self.at_s)


class DryLanes:
    """Lanes with clocks.

    Work that is issued on a lane (``spend``) begins when both the host and the lane are there.
    If ``is_async`` is False, lanes do not differ from the host, as on a CPU. Collectives begin in
    order on each lane and group, and end ``duration_s(exchange)`` later; where ``in_background`` is
    False they are work of whoever waits for them. ``note`` is told what took which time.
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
        self.now_s = 0.0
        """The clock of the host."""
        self._duration_s = duration_s
        self._note = note
        self._is_async = is_async
        self._in_background = in_background
        self._issue_s = issue_s
        self._at_s: dict[Lane, float] = dict.fromkeys(Lane, 0.0)
        self._wire_at_s: dict[tuple[Lane, tuple[int, ...]], float] = {}
        self._lane = Lane.COMPUTE
        self._waited_s = 0.0

    def spend(self, duration_s: float, what: str) -> None:
        """Do work on the current lane, which takes the device ``duration_s`` seconds."""
        self.now_s += self._issue_s
        start_s = max(self.now_s, self._at_s[self._lane])
        self._at_s[self._lane] = end_s = start_s + duration_s
        self._note(LaneSpan(self._lane, start_s, end_s, what))
        self._keep_up(end_s)

    def take_host(self, seconds: float, what: str = "") -> None:
        """Let the host be busy with something else than issuing operations: if told, with what."""
        start_s, self.now_s = self.now_s, self.now_s + seconds
        if what:
            self._note(LaneSpan("host", start_s, self.now_s, what))

    def carry(self, exchange: Exchange) -> Pending:
        """Start a collective behind the work of the current lane."""
        if len(exchange.ranks) == 1:
            return Done()
        took_s = self._duration_s(exchange)
        if not self._in_background:
            return _Arriving(self, 0.0, took_s, exchange)
        key = self._lane, exchange.ranks
        ready_s = max(self.now_s, self._at_s[self._lane])
        start_s = max(ready_s, self._wire_at_s.get(key, 0.0))
        self._wire_at_s[key] = end_s = start_s + took_s
        self._note(LaneSpan("wire", start_s, end_s, exchange.what))
        return _Arriving(self, end_s, 0.0, exchange)

    def arrive(self, pending: _Arriving) -> None:
        """Let the current lane wait until ``pending`` is done."""
        before_s = max(self.now_s, self._at_s[self._lane])
        if pending.busy_s:
            start_s = before_s
            end_s = start_s + pending.busy_s
            self._note(LaneSpan("wire", start_s, end_s, pending.exchange.what))
        else:
            end_s = max(before_s, pending.end_s)
        self._at_s[self._lane] = end_s
        if not self._is_async:
            self._waited(before_s, end_s, pending.exchange.what)
        self._keep_up(end_s)

    def end(self) -> float:
        """Return when all is done that was issued so far; the host waits for it."""
        self.now_s = max(self.now_s, *self._at_s.values(), *self._wire_at_s.values())
        self._at_s = dict.fromkeys(Lane, self.now_s)
        return self.now_s

    @property
    def computed_s(self) -> float:
        """When COMPUTE is through with what was issued to it so far."""
        return self._at_s[Lane.COMPUTE]

    def _keep_up(self, end_s: float) -> None:
        if not self._is_async:
            self.now_s = max(self.now_s, end_s)

    def _waited(self, start_s: float, end_s: float, what: str) -> None:
        if end_s > start_s:
            self._waited_s += end_s - start_s
            self._note(LaneSpan("wait", start_s, end_s, what))

    # Lanes

    @contextmanager
    def _switched(self, lane: Lane) -> Iterator[None]:
        before, self._lane = self._lane, lane
        try:
            yield
        finally:
            self._lane = before

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        """See ``Lanes``; without streams, time passes on the host all the same."""
        return self._switched(lane)

    def track_stream(self) -> None:
        """Do nothing, since computation has one stream."""

    def untrack_streams(self) -> None:
        """Do nothing, since computation has one stream."""

    def join(self, waiter: Lane, awaited: Lane) -> None:
        """See ``Lanes``."""
        before_s, there_s = self._at_s[waiter], self._at_s[awaited]
        if there_s > before_s:
            self._at_s[waiter] = there_s
            if waiter is Lane.COMPUTE and self._is_async:
                self._waited(max(before_s, self.now_s), there_s, str(awaited))

    def wire(self, lane: Lane, comm: Collectives) -> Collectives:
        """Return ``comm``, whose carrier this is."""
        return comm

    def wait(self, pending: Pending) -> None:
        """See ``Lanes``."""
        pending.wait()

    def on_user_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context that changes nothing."""
        return nullcontext()

    def wait_event(self, lane: Lane, event: Any) -> None:
        """Let ``lane`` wait for a mark of ours, and for nothing else."""
        if isinstance(event, _Reached):
            self._at_s[lane] = max(self._at_s[lane], event.at_s)

    def mark(self) -> LaneEvent:
        """See ``Lanes``."""
        return _Reached(self, self._at_s[self._lane])

    def stamp(self, lane: Lane) -> Stamp:
        """Return when the lane is through with its work."""
        return Reading(max(self.now_s, self._at_s[lane]))

    def read(self, values: Sequence[Tensor]) -> list[list[float]]:
        """Return ones: of tensors without memory nothing can be read."""
        return [[1.0] * value.numel() for value in values]

    def waited_s(self) -> float:
        """See ``Lanes``."""
        return self._waited_s
