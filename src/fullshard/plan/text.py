"""Numbers with units, for people."""

from __future__ import annotations

__all__ = ["duration", "size"]


def size(nbytes: float) -> str:
    """Return bytes as text, in powers of 1000 as data sheets have them."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while abs(value) >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.3g} {units[0]}"


def duration(seconds: float) -> str:
    """Return seconds as text: s, ms or us."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if abs(seconds) * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
