"""Run a job of the pool under a checker, with ``--lanes``; pytest itself imports only this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Checked:
    """The result of a program, and the amount of work that was checked."""

    result: Any
    figures: Counter[str]


def checked(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Checked:
    """Call ``function`` under a checker.

    Raises:
        RaceError: the program has races.
    """
    from tests.lanes.checker import Checker

    checker = Checker()
    with checker.attached():
        result = function(*args, **kwargs)
    checker.check()
    return Checked(result, checker.figures)
