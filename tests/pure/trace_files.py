"""Rank files of traces, made by hand."""

from __future__ import annotations

from typing import Any

__all__ = ["action", "rank_file", "step", "total", "unit"]

MB = 10**6


def unit(name: str, nbytes: int = 32 * MB, **other: Any) -> dict[str, Any]:
    return {
        "name": name,
        "engine": 0,
        "unsharded_nbytes": nbytes,
        "shard_nbytes": nbytes // 2,
        "reduction_nbytes": nbytes,
        "shards": 2,
        "encloses": name == "(root)",
        "after_forward": "auto",
        **other,
    }


def action(op: str, unit: int, at_s: float, took_s: float = 1e-6) -> list[Any]:
    return [op, unit, at_s, took_s, None, None]


def step(number: int = 1, duration_s: float = 0.1, **parts: Any) -> dict[str, Any]:
    return {
        "number": number,
        "start_s": 0.1 * number,
        "duration_s": duration_s,
        "allocated_nbytes": None,
        "held": {},
        "actions": [],
        "work": [],
        "buffers": [],
        "missed": [],
        **parts,
    }


def total(total_s: float = 0.0, count: int = 0) -> dict[str, float]:
    return {"count": count, "total_s": total_s, "most_s": total_s}


def rank_file(rank: int = 0, *, waited_s: float = 0.0, steps: Any = (), **other: Any) -> Any:
    """Return the file of a rank with a root and three blocks, with every step kept."""
    units = [unit("blocks.0"), unit("blocks.1"), unit("blocks.2"), unit("(root)", 4 * MB)]
    steps = list(steps) or [step()]
    waits = [{"gathers": 2, "gather": total(), "reduction": total()} for _ in units]
    waits[0]["gather"] = total(waited_s * len(steps), 1)
    return {
        "version": 1,
        "rank": rank,
        "world": 2,
        "host": "here",
        "device": "cpu",
        "started": {"wall_ns": 10**18 + rank * 1000},
        "about": {
            "folder": "/runs/7b/trace",
            "model": "Llama",
            "num_parameters": 100 * MB,
            "dtypes": ["bfloat16"],
            "command": "train.py --fast",
            "versions": {"fullshard": "1", "torch": "2"},
        },
        "first_s": None,
        "ended": {"wall_ns": 2 * 10**18, "after_s": 1.0},
        "engines": [{"prefetch_budget": None, "reduction_budget": None}],
        "units": units,
        "spent": {
            "step": total(sum(one["duration_s"] for one in steps), len(steps)),
            "evaluation": total(),
            "part": total(),
        },
        "totals": waits,
        "missed": [],
        "steps": steps,
        "unfinished": None,
        "shortage": None,
        "plan": None,
        "shift_s": 0.0,
        **other,
    }
