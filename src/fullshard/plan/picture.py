"""A plan as a picture: memory over the step, stacked by kind, above computation and waits."""

from __future__ import annotations

from pathlib import Path

from fullshard.errors import ConfigError
from fullshard.plan.plan import Plan
from fullshard.plan.text import in_bytes

_COLORS = {
    "framework": "#c8c8c8",
    "communicators": "#a9a9a9",
    "parameters": "#0072b2",
    "optimizer_state": "#56b4e9",
    "gradients": "#009e73",
    "activations": "#e69f00",
    "backward": "#f0d060",
    "unsharded": "#cc79a7",
    "gather_output": "#8b5fa8",
    "all_gather_input": "#b79ad0",
    "secondary": "#6b4a86",
    "full": "#4b2e63",
    "reduce_input": "#d55e00",
    "whole_gradients": "#66c2a4",
    "inputs": "#8c6d31",
    "staging": "#bd9e39",
    "encoded": "#7f7f7f",
    "step": "#17becf",
}
"""Colours of the kinds of bytes, which lie above each other in this order."""
_LANES = {"compute": 0, "wait": 0, "wire": 1}


def draw_plan(plan: Plan, picture: str | Path) -> None:
    """Draw ``plan`` into an SVG or PNG file, by the ending of its name.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a picture needs matplotlib: pip install -e '.[plot]' in a clone of fullshard"
        ) from error
    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=[4, 1])
    ranks = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    where = f"rank {plan.rank}, mesh {ranks}, on {plan.hardware.name}"
    figure.suptitle(f"{plan.num_parameters:,} parameters, {where}")
    at_s = [moment.at_s for moment in plan.memory]
    seen = {kind for moment in plan.memory for kind in moment.held}
    kinds = [kind for kind in _COLORS if kind in seen] + sorted(seen - _COLORS.keys())
    rows = {kind: [nbytes] * len(at_s) for kind, nbytes in plan.reserved.items() if nbytes}
    rows |= {kind: [moment.held.get(kind, 0) for moment in plan.memory] for kind in kinds}
    above.stackplot(
        at_s,
        [[nbytes / 1e9 for nbytes in row] for row in rows.values()],
        labels=[kind.replace("_", " ") for kind in rows],
        colors=[_COLORS.get(kind, "black") for kind in rows],
        step="post",
        linewidth=0,
    )
    # A moment without length, such as the peak may be, has no area.
    peak = plan.peak_nbytes
    above.axhline(peak / 1e9, color="tab:red", linewidth=1, label=f"peak, {in_bytes(peak)}")
    limit = plan.hardware.memory_nbytes
    if limit < 4 * peak:
        above.axhline(
            limit / 1e9, color="black", linestyle="--", label=f"memory, {in_bytes(limit)}"
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
