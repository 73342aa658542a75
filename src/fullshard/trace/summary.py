"""The summary of a trace: all figures that its report shows, from the files of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from fullshard.trace.findings import Rank, findings, mean_step_s, waited_s
from fullshard.trace.rankfile import CLOCKS
from fullshard.trace.shortage import ways
from fullshard.trace.spans import LANES, spans

MOST_RANKS = 8
"""Number of ranks whose lanes are shown: the first ones, and the one that waits least."""
MOST_SPANS = 2_000
"""Number of spans of a lane that are shown, the longest ones; in other steps a quarter as many."""
NUM_OTHERS = 3
"""Number of slowest steps that are shown besides the last one."""
MOST_POINTS = 1_000
"""Number of moments of memory that are shown, each the peak of its neighbourhood."""


def summarize(ranks: Sequence[Rank]) -> dict[str, Any]:
    """Return the summary of a trace, as values of JSON with a bounded size."""
    first = ranks[0]
    shown = _shown_steps(ranks)
    step, others = (shown[0] if shown else None), shown[1:]
    short = next((one for one in ranks if one["shortage"] is not None), None)
    there = {one["rank"] for one in ranks}

    def figures(rank: Rank, number: int | None, most_spans: int) -> dict[str, Any]:
        return {
            "memory": memory(rank, number),
            "lanes": _lanes(ranks, number, most_spans),
            "plan": _compared(first, number),
        }

    return {
        "clocks": CLOCKS,
        "world": first["world"],
        "missing_ranks": [rank for rank in range(first["world"]) if rank not in there],
        "device": first["device"],
        "about": first.get("about", {}) | {"wall_ns": first["started"]["wall_ns"]},
        "ranks": [_rank(one) for one in ranks],
        "steps": _steps(first),
        "units": units(ranks),
        "findings": [one._asdict() for one in findings(ranks)],
        **figures(short or first, step, MOST_SPANS),
        "others": [figures(first, other, MOST_SPANS // 4) for other in others],
        "shortage": None if short is None else _shortage(short),
    }


def _rank(rank: Rank) -> dict[str, Any]:
    step_s, waits_s = mean_step_s(rank), waited_s(rank)
    return {
        "rank": rank["rank"],
        "host": rank["host"],
        "steps": _num_steps(rank),
        "step_s": step_s,
        "waited_s": waits_s,
        "most_s": rank["spent"]["step"]["most_s"],
    }


def _steps(rank: Rank) -> dict[str, Any]:
    kept = [{"number": one["number"], "duration_s": one["duration_s"]} for one in rank["steps"]]
    slowest = sorted(kept, key=lambda one: -one["duration_s"])[:3]
    evaluation, part = rank["spent"]["evaluation"], rank["spent"]["part"]
    return {
        "count": _num_steps(rank),
        "first_s": rank.get("first_s"),
        "mean_s": mean_step_s(rank),
        "kept": [one["number"] for one in kept],
        "slowest": slowest,
        "evaluations": evaluation["count"],
        "evaluation_s": evaluation["total_s"],
        "parts": part["count"],
    }


def _num_steps(rank: Rank) -> int:
    """Return the number of complete steps, with the first one, which the sums leave out."""
    count: int = rank["spent"]["step"]["count"]
    return count + (rank.get("first_s") is not None)


def units(ranks: Sequence[Rank]) -> list[dict[str, Any]]:
    """Return a row for each unit of the first rank, the most exposed first.

    Seconds are means over ranks with the same units; other stages of a pipeline are left out.
    """
    ranks = [one for one in ranks if _names(one) == _names(ranks[0])]
    missed: Counter[int] = Counter()
    for unit, *_, count in ranks[0]["missed"]:
        missed[unit] += count
    rows = [_unit(ranks, number, missed[number]) for number in range(len(ranks[0]["units"]))]
    return sorted(rows, key=lambda row: -row["exposed_s"])


def _unit(ranks: Sequence[Rank], number: int, missed: int) -> dict[str, Any]:
    unit = ranks[0]["units"][number]
    gather, reduction = (_exposed(ranks, number, kind) for kind in ("gather", "reduction"))
    return {
        "name": unit["name"],
        "unsharded_nbytes": unit["unsharded_nbytes"],
        "shard_nbytes": unit["shard_nbytes"],
        "gathers": ranks[0]["totals"][number]["gathers"],
        "missed": missed,
        "gather_s": gather[0],
        "reduction_s": reduction[0],
        "exposed_s": gather[0] + reduction[0],
        "most_s": max(gather[1], reduction[1]),
    }


def _names(rank: Rank) -> list[str]:
    return [unit["name"] for unit in rank["units"]]


def _exposed(ranks: Sequence[Rank], unit: int, kind: str) -> tuple[float, float]:
    """Return the mean seconds a step over ranks, and the longest single wait."""
    of = [(rank, rank["totals"][unit][kind]) for rank in ranks]
    a_step = [one["total_s"] / max(1, rank["spent"]["step"]["count"]) for rank, one in of]
    return sum(a_step) / len(ranks), max((one["most_s"] for _, one in of), default=0.0)


def _shown_steps(ranks: Sequence[Rank]) -> list[int]:
    """Return steps that all ranks kept in full: the last one, and the slowest of the others."""
    common = set.intersection(*({one["number"] for one in rank["steps"]} for rank in ranks))
    if not common or any(rank["shortage"] is not None for rank in ranks):
        return sorted(common)[-1:]
    durations = {one["number"]: one["duration_s"] for one in ranks[0]["steps"]}
    last = max(common)
    return [last, *sorted(common - {last}, key=lambda number: -durations[number])[:NUM_OTHERS]]


def step_of(rank: Rank, number: int | None) -> Mapping[str, Any] | None:
    """Return a step by its number, or the failed step of a rank that ran out of memory."""
    if rank["shortage"] is not None and rank["unfinished"] is not None:
        unfinished: Mapping[str, Any] = rank["unfinished"]
        return unfinished
    return next((one for one in rank["steps"] if one["number"] == number), None)


def memory(rank: Rank, number: int | None) -> dict[str, Any] | None:
    """Return the bytes of buffers by kind over the time of a step, with the plan's prediction.

    The plan's times are stretched to the length of the step. If the step did not finish, the mean
    of the earlier steps replaces its length. In the prediction, ``same`` counts the recorded kinds
    and ``all`` counts all kinds.
    """
    step = step_of(rank, number)
    if step is None:
        return None
    shards = sum(unit["shard_nbytes"] for unit in rank["units"])
    held: Counter[str] = Counter({"parameters": shards, **step["held"]})
    points = [(0.0, dict(held))]
    for at_s, kind, nbytes, _ in step["buffers"]:
        held[kind] += nbytes
        points.append((at_s, dict(held)))
    points.append((step["duration_s"], dict(held)))
    points = thinned(points)
    kinds = [kind for kind in held if any(one.get(kind) for _, one in points)]
    most = max(points, key=lambda point: sum(point[1].values()))
    return {
        "rank": rank["rank"],
        "step": step["number"],
        "duration_s": step["duration_s"],
        "allocated_nbytes": step["allocated_nbytes"],
        "kinds": kinds,
        "points": [[at_s, *(one.get(kind, 0) for kind in kinds)] for at_s, one in points],
        "most": {"at_s": most[0], "nbytes": sum(most[1].values())},
        "planned": _planned(rank, kinds, step["duration_s"]),
    }


def thinned(points: list[tuple[float, dict[str, int]]]) -> list[tuple[float, dict[str, int]]]:
    """Return at most ``MOST_POINTS`` + 2 points: the first, the last, and peaks between them."""
    if len(points) <= MOST_POINTS:
        return points
    size = -(-len(points) // MOST_POINTS)
    parts = (points[start : start + size] for start in range(1, len(points) - 1, size))
    largest = [max(part, key=lambda point: sum(point[1].values())) for part in parts]
    return [points[0], *largest, points[-1]]


def _planned(rank: Rank, kinds: Iterable[str], duration_s: float) -> dict[str, Any] | None:
    plan = rank["plan"]
    if not plan or not plan.get("memory"):
        return None
    moments, same = plan["memory"], set(kinds)
    planned_s = plan.get("step_s") or moments[-1]["at_s"] or 1.0
    whole_s = duration_s if rank["shortage"] is None else mean_step_s(rank) or planned_s
    points = [(one["at_s"] / planned_s * whole_s, one["held"]) for one in moments]
    return {
        "hardware": plan.get("hardware"),
        "step_s": plan.get("step_s"),
        "peak": plan.get("peak"),
        "points": [
            [at_s, sum(n for kind, n in held.items() if kind in same), sum(held.values())]
            for at_s, held in thinned([one for one in points if one[0] <= duration_s * 1.001])
        ],
    }


def _lanes(ranks: Sequence[Rank], number: int | None, most_spans: int) -> list[dict[str, Any]]:
    least = min(ranks, key=waited_s)
    shown = list(ranks[:MOST_RANKS])
    if least not in shown:
        shown[-1] = least
    steps = [(rank, step) for rank in shown if (step := step_of(rank, number)) is not None]
    first_s = min((rank["shift_s"] + step["start_s"] for rank, step in steps), default=0.0)
    return [
        {
            "rank": rank["rank"],
            "duration_s": step["duration_s"],
            "lanes": _rows(rank, step, rank["shift_s"] + step["start_s"] - first_s, most_spans),
        }
        for rank, step in steps
    ]


def _rows(
    rank: Rank, step: Mapping[str, Any], shift_s: float, most_spans: int
) -> dict[str, list[list[Any]]]:
    rows: dict[str, list[list[Any]]] = {lane: [] for lane in LANES}
    for span in spans(step):
        name = rank["units"][span.unit]["name"]
        start_s = round(span.start_s + shift_s, 7)
        rows[span.lane].append([start_s, round(span.took_s, 7), span.what, name])
    for lane, row in rows.items():
        if len(row) > most_spans:
            longest = sorted(row, key=lambda one: -one[1])[:most_spans]
            rows[lane] = sorted(longest, key=lambda one: one[0])
    return rows


def _compared(rank: Rank, number: int | None) -> dict[str, Any] | None:
    """Return the first difference of a step's actions from the plan, and the missed guesses.

    The step of a rank that ran out of memory differs because it was cut off: it is not compared.
    """
    plan, step = rank["plan"], step_of(rank, number)
    if not plan or step is None or rank["shortage"] is not None:
        return None
    names = _names(rank)
    recorded = [op if unit < 0 else f"{op} {unit}" for op, unit, *_ in step["actions"]]
    return {
        "step_s": plan.get("step_s"),
        "difference": first_difference(recorded, plan.get("actions") or recorded, names),
        "missed": [names[unit] for unit, *_ in step["missed"]],
    }


def first_difference(
    recorded: Sequence[str], planned: Sequence[str], names: Sequence[str]
) -> dict[str, Any] | None:
    """Return the first action that differs from the plan; None if all are equal."""
    for index, pair in enumerate(zip_longest(recorded, planned)):
        if pair[0] != pair[1]:
            ours, theirs = (_named(one, names) for one in pair)
            return {"index": index, "recorded": ours, "planned": theirs}
    return None


def _named(action: str | None, names: Sequence[str]) -> str:
    if action is None:
        return "nothing more"
    op, _, unit = action.partition(" ")
    return f"{op} {names[int(unit)]}" if unit and int(unit) < len(names) else action


def _shortage(rank: Rank) -> dict[str, Any]:
    shortage, names = rank["shortage"], _names(rank)
    held: dict[str, Counter[str]] = {}
    for unit, kind, nbytes in shortage["held"]:
        held.setdefault(names[unit] if unit >= 0 else "(no unit)", Counter())[kind] += nbytes
    return {
        "rank": rank["rank"],
        "message": shortage["message"],
        "where": names[shortage["where"]] if shortage["where"] >= 0 else None,
        "tried_nbytes": shortage["tried_nbytes"],
        "allocated_nbytes": shortage["allocated_nbytes"],
        "held": {unit: dict(kinds) for unit, kinds in held.items()},
        "ways": [way._asdict() for way in ways(rank)],
    }
