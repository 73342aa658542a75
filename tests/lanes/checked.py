"""What the pool runs jobs under with ``--lanes``; the session itself imports no more than this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Checked:
    """What a program returned, and how much of it was looked at."""

    result: Any
    figures: Counter[str]


def checked(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Checked:
    """Call ``function`` under a checker.

    Raises:
        RaceError: it has races.
    """
    from tests.lanes.checker import Checker

    checker = Checker()
    with checker.attached():
        result = function(*args, **kwargs)
    checker.check()
    return Checked(result, checker.figures)
