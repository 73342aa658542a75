"""Words of messages: ranks by their numbers, and counts with the noun in the right form."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["counted", "named_ranks"]

_MOST = 8


def named_ranks(ranks: Sequence[int]) -> str:
    """Return words such as "rank 3" or "ranks 0, 1, 2 and 5 more"."""
    more = f" and {len(ranks) - _MOST} more" if len(ranks) > _MOST else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:_MOST])) + more


def counted(number: int, noun: str) -> str:
    """Return words such as "1 step" or "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
