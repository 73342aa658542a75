"""The loss curve as a picture."""

from __future__ import annotations

import math
from pathlib import Path

from .metrics import read_metrics


def draw_loss(metrics: Path, picture: Path) -> bool:
    """Draw training loss and held-out bits per byte; return False if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    records = read_metrics(metrics)
    evaluated = [record for record in records if "eval_bits_per_byte" in record]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display and without touching the user's backend
    left = figure.add_subplot()
    left.plot([r["step"] for r in records], [r.get("loss", math.nan) for r in records], linewidth=1)
    left.set(xlabel="step", ylabel="training loss (nats per token)")
    left.grid(alpha=0.3)
    if evaluated:
        right = left.twinx()
        steps = [record["step"] for record in evaluated]
        right.plot(steps, [r["eval_bits_per_byte"] for r in evaluated], "o-", color="tab:orange")
        right.set_ylabel("held-out bits per byte", color="tab:orange")
    figure.savefig(picture, dpi=120)
    return True
