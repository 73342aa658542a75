"""Gradients that are not finite on one rank, found before the reduction spreads them to all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from fullshard.engine import Bucket, Unit
from fullshard.frontend.held import held_params
from fullshard.tensors.names import clean_name


@dataclass
class Suspects:
    """A collector of the parameters of a bucket whose gradients on this rank are not finite."""

    found: set[str] = field(default_factory=set)

    def __call__(self, names: Sequence[str], grads: Sequence[Tensor | None]) -> None:
        """Look at this rank's ``grads``; the host waits for the device."""
        for name, grad in zip(names, grads, strict=True):
            if grad is not None and not bool(grad.isfinite().all()):
                self.found.add(name)


def look_for_suspects(units: Iterable[Unit], *, enabled: bool) -> None:
    """Look at the gradients of ``units`` from now on, or do not."""
    for bucket in (bucket for unit in units for bucket in unit.buckets):
        if (_of(bucket) is not None) != enabled:
            bucket.change_reduction(inspect=Suspects() if enabled else None)


def take_suspects(module: nn.Module, units: Sequence[Unit]) -> list[str]:
    """Return what was found in ``module``, in words and in the order of it, and forget it."""
    prefixes = {inner: prefix for prefix, inner in module.named_modules()}
    turns = {inner: turn for turn, inner in enumerate(prefixes)}
    found: dict[tuple[int, int], tuple[int, str]] = {}
    for place, held in held_params(units).items():
        suspects = _of(held.bucket)
        if suspects is not None and held.bucket.names[held.number] in suspects.found:
            name = clean_name(
                ".".join(part for part in (prefixes[place.module], place.name) if part)
            )
            text = f"{name} (unit {held.unit.name or '(root)'})"
            found.setdefault((id(held.bucket), held.number), (turns[place.module], text))
    for unit in units:
        for bucket in unit.buckets:
            suspects = _of(bucket)
            if suspects is not None:
                suspects.found.clear()
    return [text for _, text in sorted(found.values())]


def _of(bucket: Bucket) -> Suspects | None:
    inspect = bucket.reduce_policy.inspect
    return inspect if isinstance(inspect, Suspects) else None
