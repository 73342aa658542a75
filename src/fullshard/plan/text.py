"""Figures and tables as text."""

from __future__ import annotations

from fullshard.comm.text import in_bytes, table

__all__ = ["in_bytes", "in_seconds", "table"]


def in_seconds(seconds: float) -> str:
    """Return a time with three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return "0 s" if seconds < 5e-10 else f"{seconds * 1e9:.3g} ns"
