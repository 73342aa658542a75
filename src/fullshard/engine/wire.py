"""How much of what travels is lost to the codecs of ``WirePolicy``, looked at beside training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard.comm import Codec, round_trip


class WireErrors(NamedTuple):
    """What this rank lost of what it sent: the norm of the errors by the norm of the values.

    None: nothing was encoded.
    """

    gathered: float | None
    """Of this rank's shards, as all ranks computed with them."""
    reduced: float | None
    """Of this rank's gradients. The errors of ranks are independent of each other, so that of the
    mean over many ranks is smaller; means that go on over replicas count as gradients, too."""


class WireCheck:
    """A sum of the squares of errors and values, by what was done, while ``enabled``."""

    def __init__(self) -> None:
        self.enabled = False
        self._found: dict[str, list[Tensor]] = {}  # errors and values, one pair for each transfer

    def look(self, what: str, codec: Codec, values: Tensor) -> None:
        """Look at what arrives of 2-D ``values``, if enabled; sends nothing."""
        if self.enabled:
            self.compare(what, values, round_trip(codec, values))

    def compare(self, what: str, exact: Tensor, arrived: Tensor) -> None:
        """Look at what ``arrived`` in place of ``exact``."""
        exact = exact.float()
        squares = [one.square().sum(dtype=torch.float64) for one in (arrived - exact, exact)]
        self._found.setdefault(what, []).append(torch.stack(squares))

    def take(self, what: str) -> list[Tensor]:
        """Return and forget the pairs of ``what``, which may still be computed."""
        return self._found.pop(what, [])


def relative_error(pairs: Sequence[Tensor]) -> float | None:
    """Return the error by all ``pairs`` together; the host waits for the device."""
    if not pairs:
        return None
    if pairs[0].device.type != "cpu":
        torch.accelerator.synchronize()  # several streams have computed them
    errors, values = (
        math.fsum(column) for column in zip(*(p.tolist() for p in pairs), strict=True)
    )
    return math.sqrt(errors / values) if values else math.sqrt(errors)
