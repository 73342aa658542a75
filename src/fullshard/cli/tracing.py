"""``fullshard trace``: make the report of a trace from the files of its ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.cli.printing import print_table
from fullshard.plan import in_bytes, in_seconds
from fullshard.trace import combine

NUM_UNITS = 20


def trace_command(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Folder of a trace, or of a run with a folder trace."),
    ],
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON, for programs.")
    ] = False,
) -> None:
    """Combine the files of all ranks into report.html, summary.json and trace.json."""
    combined = combine(run)
    if as_json:
        print(json.dumps(combined.summary, indent=1))
        return
    _print(combined.summary)
    print(f"report: {combined.page}")
    print(f"for Perfetto: {combined.trace}")


def _print(summary: dict[str, Any]) -> None:
    steps = summary["steps"]
    mean = f", {in_seconds(steps['mean_s'])} in the mean" if steps["count"] else ""
    print(f"{summary['world']} rank(s), {steps['count']} complete step(s){mean}")
    if summary["missing_ranks"]:
        print(f"without a file: ranks {', '.join(map(str, summary['missing_ranks']))}")
    if summary["shortage"] is not None:
        _print_shortage(summary["shortage"])
    found = [(one["text"], one["change"]) for one in summary["findings"]]
    if found:
        print_table(("found", "to change"), found)
    kinds = ("exposed", "gather", "reduction")
    rows = [
        (
            one["name"],
            in_bytes(one["unsharded_nbytes"]),
            *(in_seconds(one[f"{kind}_s"]) for kind in kinds),
        )
        for one in summary["units"][:NUM_UNITS]
    ]
    print_table(("unit", "whole", "exposed", "gathers", "reductions"), rows)
    left_out = len(summary["units"]) - NUM_UNITS
    if left_out > 0:
        print(f"and {left_out} more units")


def _print_shortage(shortage: dict[str, Any]) -> None:
    print(f"out of memory on rank {shortage['rank']}: {shortage['message']}")
    rows = [(w["what"], in_bytes(w["saves_nbytes"]), w["costs"]) for w in shortage["ways"]]
    print_table(("way below", "saves", "costs"), rows)
