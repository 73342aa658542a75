"""Reports of traces: ``trace.json`` for Perfetto, ``summary.json``, and ``report.html`` to read."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.trace import rankfile
from fullshard.trace.chrome import chrome_text
from fullshard.trace.summary import summarize

_DATA = "{{data}}"


class Combined(NamedTuple):
    """The files that were written, and their summary."""

    summary: dict[str, Any]
    page: Path
    trace: Path


def combine(folder: str | Path) -> Combined:
    """Combine the files of all ranks in ``folder``, or in its folder ``trace``, into a report.

    Write ``trace.json`` (for Perfetto or chrome://tracing), ``summary.json`` and ``report.html``
    into the folder of the rank files. The page loads no other file, and shows the figures of the
    summary.

    Raises:
        ConfigError: the folder has no rank file, or one cannot be read.
    """
    ranks = rankfile.read_all(folder)
    root = Path(folder)
    if not any(root.glob("rank-*.json")):
        root = root / "trace"
    summary = summarize(ranks)
    rankfile.write_parts(root / "summary.json", [json.dumps(summary, indent=1), "\n"])
    rankfile.write_parts(root / "report.html", [page(summary)])
    rankfile.write_parts(root / "trace.json", chrome_text(ranks))
    return Combined(summary, root / "report.html", root / "trace.json")


def page(summary: dict[str, Any]) -> str:
    """Return the report as one HTML file."""
    template = resources.files("fullshard.trace").joinpath("report.html").read_text("utf-8")
    # In a script element, only "<" could end the JSON early.
    return template.replace(_DATA, json.dumps(summary).replace("<", "\\u003c"))
