"""Traces in the format of Chrome and Perfetto: one process a rank, one thread a lane."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fullshard.trace.spans import LANES, spans

_ACTIONS = len(LANES)  # the thread of all actions, at the host's times


def chrome_text(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the parts of a trace file, so that the whole file is never in memory."""
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    for number, event in enumerate(one for rank in ranks for one in chrome_events(rank)):
        yield (",\n" if number else "") + json.dumps(event, separators=(",", ":"))
    yield "\n]}\n"


def chrome_events(rank: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank, from all steps that were kept in full."""
    pid = rank["rank"]
    yield _name("process_name", pid, 0, f"rank {pid} ({rank['host']}, {rank['device']})")
    for tid, lane in enumerate((*LANES, "actions")):
        yield _name("thread_name", pid, tid, lane)
    ids = itertools.count()
    for step in rank["steps"]:
        yield from _of_step(step, rank, ids)


def _of_step(
    step: Mapping[str, Any], rank: Mapping[str, Any], ids: Iterator[int]
) -> Iterator[dict[str, Any]]:
    pid, names = rank["rank"], [unit["name"] for unit in rank["units"]]
    at_s = rank["shift_s"] + step["start_s"]

    def event(kind: str, name: str, ts: float, **more: Any) -> dict[str, Any]:
        return {"ph": kind, "name": name, "pid": pid, "ts": ts, **more}

    yield event("i", f"step {step['number']}", _us(at_s), tid=0, s="p")
    for span in spans(step):
        name, where = f"{span.what} {names[span.unit]}", {"tid": LANES.index(span.lane)}
        start, end = _us(at_s + span.start_s), _us(at_s + span.start_s + span.took_s)
        if span.lane in ("model", "exposed"):
            yield event("X", name, start, cat=span.lane, dur=end - start, **where)
            continue
        own = f"{pid}.{next(ids)}"  # they may overlap
        yield event("b", name, start, cat=span.lane, id=own, **where)
        yield event("e", name, end, cat=span.lane, id=own, **where)
    for op, unit, start_s, host_s, *_ in step["actions"]:
        name, start = op if unit < 0 else f"{op} {names[unit]}", _us(at_s + start_s)
        yield event("X", name, start, cat="action", tid=_ACTIONS, dur=_us(host_s))
    held = Counter(step["held"])
    for start_s, kind, nbytes, _ in step["buffers"]:
        held[kind] += nbytes
        yield event("C", "buffers", _us(at_s + start_s), args=dict(held))


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
