"""``python -m bench scale``: how each cost grows with ranks, units, parameters or bytes.

A curve is one cost at several sizes. Seconds are of processor time, of one rank, because other
programs may run beside it. The exponent of growth is fitted to the larger half of the sizes by
least squares in log-log. ``python -m bench scale schedule`` proves instead that the scheduler
issues the same collectives in the same order on all ranks.

    python -m bench scale                       all curves
    python -m bench scale plan layout --json    some of them, as JSON
    python -m bench scale --picture             all curves, and docs/pictures/scale.svg
    python -m bench scale schedule --ranks 16384
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import costs, order, rounds
from bench.machine import table
from fullshard.trace.report import combine

RANKS = (8, 64, 512, 4096, 16384)
UNITS = (10, 30, 100, 300, 1000, 3000)
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "scale.svg"


class Curve(NamedTuple):
    """One cost, by size.

    Attributes:
        what: a short description.
        grows_in: the name of the sizes, such as "ranks".
        sizes: in ascending order.
        cost: the cost at a size, in ``unit``.
        unit: "s" of processor time, "s of wall time", "calls", "requests" or "bytes".
    """

    what: str
    grows_in: str
    sizes: Sequence[int]
    cost: Callable[[int], float]
    unit: str = "s"


def exponent(sizes: Sequence[int], taken: Sequence[float]) -> float:
    """Return the exponent of growth over the larger half of the sizes, at least two of them."""
    first = min(len(sizes) // 2, len(sizes) - 2)
    x = [math.log(size) for size in sizes[first:]]
    y = [math.log(max(cost, 1e-9)) for cost in taken[first:]]
    return statistics.linear_regression(x, y).slope


def growth(fitted: float) -> str:
    """Return the name of an exponent, such as "constant" or "n^0.97"."""
    return "constant" if abs(fitted) < 0.05 else f"n^{fitted:.2f}"


def measure(curve: Curve, sizes: Sequence[int] = ()) -> dict[str, Any]:
    """Return the costs of a curve, and how they grow; short ones are the least of three."""
    sizes = list(sizes or curve.sizes)
    curve.cost(sizes[0])  # modules that are imported late
    found_costs = []
    for size in sizes:
        found = [curve.cost(size)]
        while curve.unit == "s" and len(found) < 3 and sum(found) < 0.5:
            found.append(curve.cost(size))
        found_costs.append(min(found))
    fitted = exponent(sizes, found_costs)
    return {
        "what": curve.what, "grows_in": curve.grows_in, "unit": curve.unit, "sizes": sizes,
        "costs": found_costs, "exponent": fitted, "growth": growth(fitted),
    }  # fmt: skip


CURVES = {
    "shard": Curve("fully_shard of a model on meta", "units", UNITS, costs.fully_shard),
    "step": Curve(
        "a step of one rank", "ranks", RANKS, partial(costs.step_of_ranks, costs.seconds)
    ),
    "step-calls": Curve(
        "the same, calls", "ranks", RANKS, partial(costs.step_of_ranks, costs.calls), "calls"
    ),
    "step-units": Curve(
        "a step of one rank", "units", UNITS, partial(costs.step_of_units, costs.seconds)
    ),
    "scheduler": Curve("the scheduler's share of a step", "units", UNITS, costs.scheduler),
    "layout": Curve("layouts of 100 parameters, proved", "ranks", RANKS, costs.layout),
    "layout-params": Curve(
        "layouts for 1,024 ranks, proved", "parameters", UNITS, lambda n: costs.layout(1024, n)
    ),
    "plan": Curve("fullshard.plan of a small model", "ranks", RANKS, costs.plan),
    "describe": Curve("write, read, describe a manifest", "ranks", RANKS, costs.describe),
    "verify": Curve("verify one's own data file", "ranks", RANKS, costs.verify),
    "load": Curve("load one's own share", "ranks", RANKS, costs.load),
    "list": Curve("list a folder of checkpoints", "checkpoints", (4, 8, 16, 32), costs.list_root),
    "latest": Curve("find the newest checkpoint", "checkpoints", (4, 8, 16, 32), costs.latest),
    "save": Curve(
        "a save", "ranks", (8, 64, 256, 1024),
        partial(costs.requests, lambda _: partial(rounds.save, 2)), "requests",
    ),
    "diagnosis": Curve(
        "a diagnosis", "ranks", (8, 64, 256, 1024), partial(costs.requests, rounds.diagnosis),
        "requests",
    ),
    "answers": Curve(
        "one store answers 16 requests of each", "ranks", (64, 256, 1024, 4096, 16384),
        costs.answers, "s of wall time",
    ),
    "data": Curve(
        "text of four workers", "bytes", tuple(1 << n for n in (16, 18, 20, 22)), costs.text
    ),
    "trace": Curve(
        "report of a trace, 500 units", "ranks", (4, 8, 16, 32, 64),
        partial(costs.trace, lambda folder: costs.seconds(lambda: combine(folder))),
    ),
    "trace-bytes": Curve(
        "the page of that report", "ranks", (4, 8, 16, 32, 64),
        partial(costs.trace, costs.report_nbytes),
        "bytes",
    ),
}  # fmt: skip
"""All curves, by the name by which one is chosen."""


def figures(names: Sequence[str] = (), nbytes: int | None = None) -> dict[str, Any]:
    """Return the curves that are named, or all; text of ``nbytes`` at most."""
    torch.set_num_threads(1)
    found = {}
    for name in names or CURVES:
        curve = CURVES[name]
        if name == "data" and nbytes is not None:
            curve = curve._replace(sizes=[max(nbytes >> n, 1) for n in (6, 4, 2, 0)])
        found[name] = measure(curve)
        print(f"{name}: {found[name]['growth']}", file=sys.stderr, flush=True)
    return found


def report(found: dict[str, Any]) -> int:
    """Print the table; return 0, as there are no bounds."""
    print("processor time or counts, by size\n")
    rows = [
        [name, one["what"], one["grows_in"], ", ".join(f"{size:,}" for size in one["sizes"]),
         ", ".join(f"{cost:,.3g}" if one["unit"].startswith("s") else f"{cost:,.0f}"
                   for cost in one["costs"]), one["unit"], one["growth"]]
        for name, one in found.items()
    ]  # fmt: skip
    print(table(["curve", "", "grows in", "sizes", "costs", "unit", "growth"], rows))
    return 0


def picture(found: dict[str, Any], path: Path = PICTURE) -> None:
    """Draw the curves that are in seconds, by what they grow in, into an SVG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "scale", "font.size": 8})
    timed = {name: one for name, one in found.items() if one["unit"] == "s"}
    wide = [("ranks",), ("units", "parameters"), ("checkpoints", "bytes")]
    panels = [[n for n, one in timed.items() if one["grows_in"] in those] for those in wide]
    panels = [names for names in panels if names]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(10, 3.6), squeeze=False)
    for at, names in zip(axes[0], panels, strict=True):
        for name in names:
            one = timed[name]
            at.loglog(one["sizes"], one["costs"], marker=".", label=f"{name}, {one['growth']}")
        at.set_xlabel(" or ".join(dict.fromkeys(timed[name]["grows_in"] for name in names)))
        at.legend(fontsize=7)
        at.grid(alpha=0.3)
    axes[0][0].set_ylabel("seconds of processor time")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str]) -> int:
    """Run ``python -m bench scale``; return 1 if the order of collectives differs."""
    parser = argparse.ArgumentParser("python -m bench scale", description="How costs grow.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"schedule, {', '.join(CURVES)}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", action="store_true", help=f"write {PICTURE.name}")
    parser.add_argument("--bytes", type=int, help="the largest text, for the curve of data")
    parser.add_argument("--ranks", type=int, default=16384, help="ranks of the schedule")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in (*CURVES, "schedule")]
    if unknown:
        parser.error(
            f"unknown {', '.join(unknown)}; expected some of schedule, {', '.join(CURVES)}"
        )
    if given.names == ["schedule"]:
        start = time.process_time()
        proof = order.prove(given.ranks)
        seconds = time.process_time() - start
        print(json.dumps(dataclasses.asdict(proof)) if given.json else f"{proof} ({seconds:.1f} s)")
        return int(bool(proof.apart))
    found = figures([name for name in given.names if name != "schedule"], given.bytes)
    if given.picture:
        picture(found)
    if given.json:
        print(json.dumps(found))
    return 0 if given.json else report(found)
