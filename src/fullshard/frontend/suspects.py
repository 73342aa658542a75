"""Gradients that are not finite on one rank, found before the reduction spreads them to all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from torch import Tensor

from fullshard.engine import Unit

_turns = count()  # the order of all finds in this process


@dataclass
class Suspects:
    """A collector of the names of a unit's parameters whose gradients here are not finite."""

    unit: Unit
    found: dict[str, int] = field(default_factory=dict)
    """Name -> turn."""

    def __call__(self, names: Sequence[str], grads: Sequence[Tensor | None]) -> None:
        """Look at this rank's ``grads``; the host waits for the device."""
        for name, grad in zip(names, grads, strict=True):
            if grad is not None and name not in self.found and not bool(grad.isfinite().all()):
                self.found[name] = next(_turns)


def look_for_suspects(units: Iterable[Unit], *, enabled: bool) -> None:
    """Look at the gradients of ``units`` from now on, or do not."""
    for unit in units:
        suspects = _of(unit)
        if (suspects is not None) != enabled:
            suspects = Suspects(unit) if enabled else None
            for bucket in unit.buckets:
                bucket.change_reduction(inspect=suspects)


def take_suspects(units: Iterable[Unit]) -> list[str]:
    """Return what was found, in words, the first find first, and forget it."""
    found: list[tuple[int, str]] = []
    for unit in units:
        suspects = _of(unit)
        if suspects is not None:
            where = f"unit {unit.name or '(root)'}"
            found += [(turn, f"{name} of {where}") for name, turn in suspects.found.items()]
            suspects.found.clear()
    return [text for _, text in sorted(found)]


def _of(unit: Unit) -> Suspects | None:
    for bucket in unit.buckets:
        inspect = bucket.reduce_policy.inspect
        if isinstance(inspect, Suspects) and inspect.unit is unit:
            return inspect
    return None
