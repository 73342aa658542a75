"""Is this machine quiet enough to measure on?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


class Loaded(Exception):
    """The machine was not idle: figures taken then would mean nothing."""

    def __init__(self, drift: float) -> None:
        super().__init__(
            f"refused: the machine is loaded, a fixed matmul took up to {drift:.0%} longer at "
            "times; try again when it is idle"
        )


@dataclass
class LoadGuard:
    """Times one fixed matmul before, between and after: if that drifts, so did everything else."""

    tolerance: float = 0.10
    seconds: list[float] = field(default_factory=list)

    def sample(self, window_s: float = 0.3) -> None:
        """Time it now, for a fixed while, so that ranks which begin together end together."""
        a = torch.ones(384, 384)
        times = []
        end = time.perf_counter() + window_s
        while (start := time.perf_counter()) < end:
            a @ a
            times.append(time.perf_counter() - start)
        self.seconds.append(statistics.median(times))

    @property
    def drift(self) -> float:
        """How much the slowest sample exceeds the usual one.

        Faster ones are no load: where two ranks share the halves of one core, a sample that the
        other rank's overlaps only in part runs up to a third faster.
        """
        return max(self.seconds) / statistics.median(self.seconds) - 1


@contextmanager
def idle() -> Iterator[None]:
    """Refuse what was measured in the block if the machine was loaded before or after it.

    Raises:
        Loaded: it was.
    """
    guard = LoadGuard()
    for _ in range(3):
        guard.sample()
    yield
    for _ in range(3):
        guard.sample()
    if guard.drift > guard.tolerance:
        raise Loaded(guard.drift)


def grid(
    corner: str,
    found: Mapping[str, Mapping[str, float]],
    columns: Iterable[str] | None = None,
    digits: int = 2,
) -> str:
    """A Markdown table of numbers, by row and by column."""
    columns = list(columns or next(iter(found.values())))
    rows = [[name, *(f"{one[c]:.{digits}f}" for c in columns)] for name, one in found.items()]
    return table([corner, *columns], rows)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
