"""The status that each rank publishes in a round of the watch."""

from __future__ import annotations

import json
from typing import NamedTuple

from fullshard.comm.ledger import BETWEEN_STEPS

__all__ = ["Absence", "Group", "Issued", "StatusReport"]


class Issued(NamedTuple):
    """A collective that the rank issued."""

    number: int
    """Its number among those of the group since the last fault."""
    kind: str
    label: str
    nbytes: int

    def text(self, *, whole: bool = False) -> str:
        """Return words such as "the gather of unit blocks.3"; ``whole``: with all that is known."""
        purpose = self.label if whole else self.label.rpartition(" (")[0] or self.label
        size = f", {self.nbytes} bytes" if whole else ""
        return f"the {self.kind}" + (f" of {purpose}" if purpose else "") + size


class Group(NamedTuple):
    """What the rank issued on one process group since the last fault."""

    name: str
    ranks: tuple[int, ...]
    """The members, by their ranks in the job."""
    num_issued: int
    recent: tuple[Issued, ...]
    """The newest collectives, oldest first; the awaited one precedes them if it is older."""
    waiting: int | None
    """The number of what the rank waits for."""
    waited_s: float
    num_ended: int = 0
    """How many had been issued when the last step of training ended well."""
    on_device: bool = False
    """True if the rank's device waits for it, and the rank itself may have gone on."""

    @property
    def blocks(self) -> bool:
        """True if the rank itself waits for a collective."""
        return self.waiting is not None and not self.on_device

    @property
    def blocks_step(self) -> bool:
        """True if the rank itself waits for one before which its weights are not stepped."""
        waits_for = None if self.waiting is None else self.numbered(self.waiting)
        return self.blocks and (waits_for is None or waits_for.kind not in BETWEEN_STEPS)

    @property
    def newest(self) -> Issued | None:
        """The last collective issued."""
        return self.recent[-1] if self.recent else None

    def numbered(self, number: int) -> Issued | None:
        """Return the collective ``number``, if it is remembered."""
        return next((one for one in self.recent if one.number == number), None)


class StatusReport(NamedTuple):
    """The status of one rank."""

    rank: int
    groups: tuple[Group, ...]
    is_open: bool
    """True in a step: from the beginning of a forward to the end of its backward."""
    failure: str
    """The exception that ended its last step or its program; empty if there is none."""
    failed_s: float
    """How long ago that was, in seconds."""
    stack: str
    """Where its main thread is, in the user's files."""
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
                Group(name, tuple(ranks), num, tuple(Issued(*one) for one in recent), *waits)
                for name, ranks, num, recent, *waits in groups
            ),
            *rest,
        )


class Absence(NamedTuple):
    """Why a rank says nothing."""

    why: str
    """A clause without its subject, such as "was stopped by a signal"."""
    is_final: bool
    """True if the rank will never come back."""
    least_wait_s: float = 0.0
    """How long others must have waited for the rank before it counts as lost, in seconds.

    Above 0 if nothing but its silence in the store says so: the rank may be cut off from the store
    alone.
    """
