"""Draws the pictures of docs/quickstart.md that come from a run: its live view, and its loss.

    make train
    .venv/bin/python docs/run/make.py runs/default

The view is that of the run's own records, through the very code that shows it on a terminal.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from fullshard.train.run import Reporter, RunDir, StepRecord, planned_flops, read_metrics

HERE = Path(__file__).parent


def main(run: Path) -> None:
    """Writes ``live-view.svg`` and ``loss.png`` beside this file."""
    names = {field.name for field in fields(StepRecord)}
    lines = read_metrics(run / "metrics.jsonl")
    records = [StepRecord(**{k: v for k, v in line.items() if k in names}) for line in lines]
    console = Console(record=True, force_terminal=True, width=80, file=io.StringIO())
    now = 0.0
    half = records[: len(records) // 2]
    with Reporter(
        total=records[-1].step,
        first=0,
        enabled=True,
        flops=planned_flops(RunDir(run)),
        console=console,
        clock=lambda: now,
    ) as reporter:
        for record in half:
            now += record.seconds
            reporter.show(record)
    picture = console.export_svg(title=f"fullshard train, step {half[-1].step}")
    # rich names fonts on the web; a picture should need nothing from elsewhere
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    (HERE / "live-view.svg").write_text(picture, encoding="utf-8")
    shutil.copyfile(run / "loss.png", HERE / "loss.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
