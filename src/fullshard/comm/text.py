"""Words of messages: ranks by their numbers, counts with their noun, bytes, tables."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["counted", "in_bytes", "in_notebook", "listed", "named_ranks", "table"]


def named_ranks(ranks: Sequence[int], *, most: int = 8) -> str:
    """Return words such as "rank 3" or "ranks 0, 1, 2 and 5 more", with up to ``most`` numbers."""
    return ("rank " if len(ranks) == 1 else "ranks ") + listed(ranks, most)


def listed(names: Iterable[object], most: int = 8, between: str = ", ") -> str:
    """Return words such as "weight, bias and 5 more", with the first ``most`` names."""
    shown = [*map(str, names)]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return between.join(shown[:most]) + more


def counted(number: int, noun: str) -> str:
    """Return words such as "1 step" or "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def in_notebook(shown: object) -> str:
    """Return the text of an object as HTML, with its lines and columns as they are."""
    return f"<pre>{html.escape(str(shown))}</pre>"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = True
) -> Iterator[str]:
    """Yield the lines of a table; all columns but the first are right-aligned if ``right``."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = (
            text.rjust(width) if right and i else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def in_bytes(nbytes: float) -> str:
    """Return a number of bytes with three digits and a decimal unit, as memory is sold."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 999.5 or unit == "TB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" or abs(nbytes) >= 999.5 else f"{nbytes:.3g} {unit}"
