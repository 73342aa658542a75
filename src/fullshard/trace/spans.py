"""Turn the actions of a step into spans of time: for the lanes of a report, and for Chrome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

LANES = ("model", "exposed", "gathers", "reductions")
"""The lanes: computation, waits of the model, and communication from its start to its end."""

_STARTS = {"unshard": "gathers", "reduce_scatter": "reductions"}
_ENDS = {
    "wait": "gathers",
    "finish_gather": "gathers",
    "finish_reduce": "reductions",
    "keep_partial": "reductions",
}


class Span(NamedTuple):
    """A stretch of time, in seconds since the step began."""

    lane: str
    what: str
    unit: int
    start_s: float
    took_s: float


def spans(step: Mapping[str, Any]) -> list[Span]:
    """Return all spans of a step of a rank file, at times of the device's lanes if known.

    A gather counts until the end of the wait for its result, though it may be complete earlier.
    """
    found = [Span("model", what, unit, at_s, took) for what, unit, at_s, took in step["work"]]
    begun: dict[tuple[str, int], float] = {}
    for action in step["actions"]:
        op, unit = action[0], action[1]
        start_s, took_s = when(action)
        if op in _STARTS:
            begun[_STARTS[op], unit] = start_s
        elif op in _ENDS:
            at_s = begun.pop((_ENDS[op], unit), None)
            if at_s is not None:
                end_s = start_s + took_s
                found.append(Span(_ENDS[op], op, unit, at_s, max(0.0, end_s - at_s)))
            if op != "keep_partial":
                found.append(Span("exposed", op, unit, start_s, took_s))
    return found


def when(action: Sequence[Any]) -> tuple[float, float]:
    """Return the start and the seconds of an action, on its lane if these times are known."""
    _, _, at_s, host_s, lane_start_s, lane_s = action
    return (at_s, host_s) if lane_start_s is None else (lane_start_s, lane_s)
