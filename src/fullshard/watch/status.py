"""The status that each rank publishes in a round of the watch."""

from __future__ import annotations

import json
from typing import NamedTuple

from fullshard.comm.ledger import BETWEEN_STEPS

__all__ = ["GroupStatus", "Issued", "StatusReport"]


class Issued(NamedTuple):
    """A collective that a rank issued."""

    number: int
    """The number of the collective in its group, counted from the last fault."""
    kind: str
    label: str
    nbytes: int

    def text(self, *, whole: bool = False) -> str:
        """Return words such as "the gather of unit blocks.3"; with all details if ``whole``."""
        purpose = self.label if whole else self.label.rpartition(" (")[0] or self.label
        size = f", {self.nbytes} bytes" if whole else ""
        return f"the {self.kind}" + (f" of {purpose}" if purpose else "") + size


class GroupStatus(NamedTuple):
    """The collectives of one rank on one process group since the last fault."""

    name: str
    ranks: tuple[int, ...]
    """The ranks of the group, numbered as in the job."""
    num_issued: int
    recent: tuple[Issued, ...]
    """The newest collectives, oldest first, after the awaited one if that is older."""
    waiting: int | None
    """The number of the awaited collective; None if the rank does not wait."""
    waited_s: float
    """Seconds that the rank has waited."""
    num_ended: int = 0
    """The number of collectives issued before the last training step ended without an error."""
    on_device: bool = False
    """True if the device waits, and the host may have gone on."""
    num_closed: int = 0
    """The number of collectives issued before a step was last closed without an error."""

    @property
    def blocks_step(self) -> bool:
        """True if the host waits for a collective of a step whose weights are not stepped yet."""
        if self.waiting is None or self.on_device:
            return False
        waits_for = self.numbered(self.waiting)
        return waits_for is None or waits_for.kind not in BETWEEN_STEPS

    @property
    def newest(self) -> Issued | None:
        """The collective issued last; None if none is remembered."""
        return self.recent[-1] if self.recent else None

    def numbered(self, number: int) -> Issued | None:
        """Return the collective ``number``; None if it is not remembered."""
        return next((one for one in self.recent if one.number == number), None)


class StatusReport(NamedTuple):
    """The status of one rank."""

    rank: int
    groups: tuple[GroupStatus, ...]
    is_open: bool
    """True in a step: from the start of a forward to the end of its backward."""
    failure: str
    """The exception that ended the rank's last step or its program; empty if none did."""
    failed_s: float
    """Seconds since that exception."""
    stack: str
    """The place of the main thread in the user's files; empty if unknown."""
    is_half_stepped: bool = False
    """True if the exception left a step of an optimizer, so the weights are half-stepped."""
    ends_program: bool = False
    """True if the exception ends the program."""

    def encoded(self) -> str:
        """Return the report as JSON."""
        return json.dumps(self)

    @classmethod
    def decoded(cls, text: str) -> StatusReport:
        """Return the report that ``encoded`` turned into ``text``."""
        rank, groups, *rest = json.loads(text)
        return cls(
            rank,
            tuple(
                GroupStatus(name, tuple(ranks), num, tuple(Issued(*one) for one in recent), *waits)
                for name, ranks, num, recent, *waits in groups
            ),
            *rest,
        )
