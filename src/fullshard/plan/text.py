"""Figures and tables as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fullshard.comm.text import in_bytes

__all__ = ["in_bytes", "in_seconds", "table"]


def in_seconds(seconds: float) -> str:
    """Return a time with three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return "0 s" if seconds < 5e-10 else f"{seconds * 1e9:.3g} ns"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; the first column is left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        first, *others = (
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join((first, *others)).rstrip()
