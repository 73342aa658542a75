"""Find causes of lost time or memory in rank files, and suggest a change for each."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fullshard.comm.text import listed
from fullshard.plan.text import in_bytes, in_seconds
from fullshard.trace.spans import when

Rank = Mapping[str, Any]
"""The contents of a rank file."""

LEAST_SHARE = 0.01
"""The share of a step below which exposed communication is not worth a change."""
LEAST_S = 50e-6
NEARLY = 0.95
"""The share of a wait from which on it counts as the whole wait."""
NUM_NAMED = 3
"""Number of units that are named one by one."""
STRAGGLES = 0.05
"""The difference of waits, as a share of a step, above which one rank delays the others."""
LARGE, SMALL = 4.0, 1 / 8
"""Multiples of the median size beyond which a unit is far larger or far smaller."""
TINY_NBYTES, TINY_SHARE, NUM_TINY = 10**6, 0.1, 8
"""Units are too small if there are as many, and of such a median size, and computation waits for
them for this share of a step."""


class Finding(NamedTuple):
    """A cause of lost time or memory, and a change against it."""

    kind: str
    unit: str | None
    text: str
    change: str
    cost_s: float
    """Seconds a step; 0 if the cost is unknown."""


class _Exposed(NamedTuple):
    """The time that one unit costs in a step."""

    unit: int
    exposed_s: float
    hidden_s: float
    """Upper bound of the seconds that one more prefetched unit, or reduction in flight, hides."""


def findings(ranks: Sequence[Rank]) -> list[Finding]:
    """Return all findings, the most expensive first."""
    found = [
        *tiny_units(ranks[0]),
        *exposed(ranks[0], "gather"),
        *exposed(ranks[0], "reduction"),
        *missed_guesses(ranks[0]),
        *stragglers(ranks),
        *unequal_units(ranks[0]["units"]),
    ]
    return sorted(found, key=lambda one: -one.cost_s)


def mean_step_s(rank: Rank) -> float:
    """Return the mean duration of all steps; 0 without any."""
    spent = rank["spent"]["step"]
    return float(spent["total_s"] / spent["count"]) if spent["count"] else 0.0


def waited_s(rank: Rank) -> float:
    """Return the seconds a step that computation waited for communication."""
    exposed = (one[kind] for one in rank["totals"] for kind in ("gather", "reduction"))
    return float(sum(one["total_s"] for one in exposed) / max(1, rank["spent"]["step"]["count"]))


def tiny_units(rank: Rank) -> list[Finding]:
    """Return a finding if many small units wait: each message takes longer than its bytes do."""
    sizes = [one["unsharded_nbytes"] for one in rank["units"] if one["unsharded_nbytes"]]
    waits_s = waited_s(rank)
    if len(sizes) < NUM_TINY or waits_s < TINY_SHARE * mean_step_s(rank):
        return []
    median = statistics.median(sizes)
    if median >= TINY_NBYTES or waits_s == 0.0:
        return []
    blocks = next((n for n in (2, 4) if n * median >= TINY_NBYTES), 8)
    text = (
        f"{len(sizes)} units with a median of {in_bytes(median)}: computation waits "
        f"{in_seconds(waits_s)} a step for gathers and reductions, probably more for the latency "
        "of each message than for its bytes"
    )
    change = (
        "put neighbouring blocks into one unit: "
        f"shard_blocks(model, plan=fullshard.Choice(blocks_per_unit={blocks}))"
    )
    return [Finding("size", None, text, change, waits_s)]


def exposed(rank: Rank, kind: str) -> list[Finding]:
    """Return the units for whose gathers, or reductions, computation waits.

    Units that a larger budget could hide share one finding, as the budget is set once for the
    model.
    """
    of_step = _gathers if kind == "gather" else _reductions
    steps = [one for one in rank["steps"] if one["number"] > 1] or rank["steps"]
    least_s = max(LEAST_S, LEAST_SHARE * mean_step_s(rank))
    found = [one for one in _mean(map(of_step, steps)) if one.exposed_s >= least_s]
    hidable = [one for one in found if one.hidden_s > 0]
    alone = [one for one in found if one.hidden_s <= 0]
    return [
        *([_hidable(rank, kind, hidable)] if hidable else []),
        *(_alone(rank, kind, one) for one in alone[:NUM_NAMED]),
        *_the_rest(kind, alone[NUM_NAMED:]),
    ]


def _named(rank: Rank, kind: str, found: Sequence[_Exposed]) -> str:
    """Return words such as "block.1: gather exposed 1 ms a step", with the most exposed units."""
    total_s = sum(one.exposed_s for one in found)
    named = [(rank["units"][one.unit]["name"], one.exposed_s) for one in found[:NUM_NAMED]]
    if len(found) == 1:
        return f"{named[0][0]}: {kind} exposed {in_seconds(total_s)} a step"
    most = ", ".join(f"{name} ({in_seconds(seconds)})" for name, seconds in named)
    return f"{kind}s of {len(found)} units exposed {in_seconds(total_s)} a step, most in {most}"


def _alone(rank: Rank, kind: str, one: _Exposed) -> Finding:
    """Return the finding of a unit that no budget can hide."""
    name = rank["units"][one.unit]["name"]
    why, change = _NOTHING_LEFT[kind]
    text = f"{_named(rank, kind, [one])}; {why}"
    return Finding(kind, name, text, change.format(name=name), one.exposed_s)


_NOTHING_LEFT = {
    "gather": (
        "nothing runs before it that could hide it",
        "move parameters out of {name}, or start its gather earlier with unshard(async_op=True)",
    ),
    "reduction": (
        "backward is over by then, so nothing is left to hide it",
        "move parameters out of {name}, whose reduction is among the last",
    ),
}


def _hidable(rank: Rank, kind: str, found: Sequence[_Exposed]) -> Finding:
    """Return the finding of units that a larger budget could hide."""
    units = [rank["units"][one.unit] for one in found]
    name, size = _BUDGETS[kind]
    nbytes = max(unit[size] for unit in units)
    budget = rank["engines"][units[0]["engine"]][name]
    total_s, hidden_s = (sum(column) for column in list(zip(*found, strict=True))[1:])
    if kind == "gather":
        holds, least = "one unit ahead", 3 * nbytes
        if budget is not None:
            holds = f"{in_bytes(budget)}, {budget // max(1, nbytes)} such units"
        hides = hidden_s >= NEARLY * total_s
        would = "hide this" if hides else f"hide {in_seconds(hidden_s)} of this at most"
        more = f"would {would} and"
    else:
        holds, least = "one reduction" if budget is None else in_bytes(budget), 2 * nbytes
        more = "in flight would"
    text = (
        f"{_named(rank, kind, found)}; the {name.replace('_', ' ')} holds {holds}, and one more "
        f"{more} cost {in_bytes(nbytes)}"
    )
    change = f"set_{name}({least if budget is None else budget + nbytes})"
    return Finding(kind, units[0]["name"], text, change, total_s)


_BUDGETS = {
    "gather": ("prefetch_budget", "unsharded_nbytes"),
    "reduction": ("reduction_budget", "reduction_nbytes"),
}


def missed_guesses(rank: Rank) -> list[Finding]:
    """Return the guesses of the prefetcher that never came, the most frequent first."""
    units = rank["units"]

    def name(number: int) -> str:
        return "the end of the pass" if number < 0 else str(units[number]["name"])

    return [
        Finding(
            "guess",
            name(unit),
            f"{name(unit)} was gathered in vain {'once' if count == 1 else f'{count} times'}: "
            f"expected after {name(guessed_in)}, but {name(came)} came; "
            f"{in_bytes(count * units[unit]['unsharded_nbytes'])} in all",
            "where the order of units changes from step to step, name those that follow with "
            "set_modules_to_forward_prefetch, or put units that are skipped together into one",
            0.0,
        )
        for unit, guessed_in, came, count in sorted(rank["missed"], key=lambda one: -one[3])
    ][: 2 * NUM_NAMED]


def stragglers(ranks: Sequence[Rank]) -> list[Finding]:
    """Return a finding if the others wait for one rank, the rank that waits least."""
    waited = sorted((waited_s(rank), rank["rank"], rank["host"]) for rank in ranks)
    step_s = max(map(mean_step_s, ranks))
    if len(ranks) < 2 or step_s == 0.0:
        return []
    least_s, number, host = waited[0]
    others_s = statistics.median(one[0] for one in waited[1:])
    if others_s - least_s < STRAGGLES * step_s:
        return []
    return [
        Finding(
            "straggler",
            None,
            f"rank {number} ({host}) waits {in_seconds(least_s)} a step, the others "
            f"{in_seconds(others_s)}: they wait for it",
            f"look for what slows rank {number}: its input, its processor, or its device",
            others_s - least_s,
        )
    ]


def unequal_units(units: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return units far larger or smaller than the median of units without inner units."""
    leaves = [one for one in units if not one["encloses"] and one["unsharded_nbytes"]]
    if len(leaves) < 4:
        return []
    median = statistics.median(one["unsharded_nbytes"] for one in leaves)
    large = [one for one in leaves if one["unsharded_nbytes"] > LARGE * median]
    small = [one for one in leaves if one["unsharded_nbytes"] < SMALL * median]
    found = []
    for some, far, change in (
        (large, "far larger", "split it, so that its gather hides behind its neighbours"),
        (small, "far smaller", "put it into one unit with a neighbour: fewer, larger messages"),
    ):
        if some:
            sizes = [f"{one['name']} ({in_bytes(one['unsharded_nbytes'])})" for one in some]
            text = f"{far} than the median unit ({in_bytes(median)}): {listed(sizes, 5)}"
            found.append(Finding("size", some[0]["name"], text, change, 0.0))
    return found


def _mean(steps: Iterable[Iterable[_Exposed]]) -> list[_Exposed]:
    """Return the mean over steps for each unit, the most exposed first."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    count = 0
    for step in steps:
        count += 1
        for unit, exposed_s, hidden_s in step:
            sums[unit][0] += exposed_s
            sums[unit][1] += hidden_s
    found = [_Exposed(unit, *(one / count for one in both)) for unit, both in sums.items()]
    return sorted(found, key=lambda one: -one.exposed_s)


def _gathers(step: Mapping[str, Any]) -> list[_Exposed]:
    """Return the waits for gathers; an earlier start can hide each up to ``hidden_s``."""
    starts = sorted(at_s for _, _, at_s, _ in step["work"])
    begun: dict[int, float] = {}
    found = []
    for action in step["actions"]:
        op, unit, at_s = action[:3]
        if op == "unshard":
            begun[unit] = at_s
        elif op in ("wait", "finish_gather") and unit in begun:
            index = bisect_right(starts, begun.pop(unit)) - 1
            earlier_s = starts[index] - starts[index - 1] if index > 0 else 0.0
            exposed_s = when(action)[1]
            found.append(_Exposed(unit, exposed_s, min(exposed_s, earlier_s)))
    return found


def _reductions(step: Mapping[str, Any]) -> list[_Exposed]:
    """Return the waits for reductions; the rest of backward can hide each up to ``hidden_s``."""
    ends = [at_s + took for what, _, at_s, took in step["work"] if what == "backward"]
    last_s = max(ends, default=0.0)
    return [
        _Exposed(action[1], took := when(action)[1], min(took, max(0.0, last_s - action[2])))
        for action in step["actions"]
        if action[0] == "finish_reduce"
    ]


def _the_rest(kind: str, rest: Sequence[_Exposed]) -> list[Finding]:
    if not rest:
        return []
    total_s = sum(one.exposed_s for one in rest)
    text = f"{kind}s of {len(rest)} more units are exposed, {in_seconds(total_s)} a step together"
    return [Finding(kind, None, text, "see the table of units", total_s)]
