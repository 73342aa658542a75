"""A plan as a picture: memory over the step, stacked by kind, above computation and waits."""

from __future__ import annotations

from pathlib import Path

from fullshard.errors import ConfigError
from fullshard.plan.plan import Plan

_LANES = {"compute": 0, "wait": 0, "wire": 1}


def draw_plan(plan: Plan, picture: str | Path) -> None:
    """Draw ``plan`` into an SVG or PNG file, by the ending of its name.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a picture needs matplotlib: pip install -e '.[plot]' in a clone of fullshard"
        ) from error
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display and without touching the user's backend
    above, below = figure.subplots(2, sharex=True, height_ratios=[4, 1])
    at_s = [moment.at_s for moment in plan.memory]
    kinds = sorted(
        {kind for moment in plan.memory for kind in moment.held},
        key=lambda kind: -min(moment.held.get(kind, 0) for moment in plan.memory),
    )
    held = [[moment.held.get(kind, 0) / 1e9 for moment in plan.memory] for kind in kinds]
    above.stackplot(
        at_s, held, labels=[kind.replace("_", " ") for kind in kinds], step="post", linewidth=0
    )
    limit = plan.hardware.memory_nbytes - sum(plan.reserved.values())
    if limit < 4e9 * max(map(sum, zip(*held, strict=True)), default=0):
        above.axhline(
            limit / 1e9, color="black", linestyle="--", linewidth=1, label="what there is"
        )
    above.set_ylabel("GB")
    above.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")
    for name, color in (("compute", "tab:blue"), ("wire", "tab:green"), ("wait", "tab:red")):
        spans = [(s.start_s, s.end_s - s.start_s) for s, _ in plan.spans if s.lane == name]
        below.broken_barh(spans, (_LANES[name] - 0.4, 0.8), color=color, linewidth=0)
    below.set_yticks([0, 1], ["computes\n(red: waits)", "wires"])
    below.set_xlabel("seconds")
    try:
        figure.savefig(picture, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{picture}: cannot be written ({error})") from error
