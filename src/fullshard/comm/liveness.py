"""Which ranks do not answer, and why: exit reasons, heartbeats, and the processes of this host."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch.distributed as dist

from fullshard.comm.pulse import PULSE_S, Sign, last_sign, silence_s

__all__ = ["DEAD", "STOPPED", "Absence", "Liveness", "ended_key"]

DEAD = "ended without a word: killed, or it crashed"
STOPPED = "was stopped by a signal"


class Absence(NamedTuple):
    """The reason why a rank did not report its status."""

    why: str
    """A clause without its subject, such as "was stopped by a signal"."""
    is_final: bool
    """True if the rank will never come back."""
    least_wait_s: float = 0.0
    """Seconds that other ranks must have waited for the rank before it counts as lost.

    Above 0 if the only evidence is the rank's silence in the store: its connection to the store
    may be broken while it still takes part in collectives.
    """


class Liveness:
    """The ranks of a job and their heartbeats, as far as they were looked for."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._seen: dict[int, tuple[int, float]] = {}  # by rank: a sign's number, when seen first

    def is_dead(self, rank: int) -> bool:
        """Return whether ``rank`` has said its last words, or was of this host and has ended."""
        sign = last_sign(self._store, rank)
        is_gone = sign is not None and sign.is_of_the_dead
        return is_gone or self._store.check([ended_key(rank)])

    def saw(self, signs: Mapping[int, int]) -> None:
        """Take note of the numbers of signs of life that another rank found."""
        now_s = time.monotonic()
        for rank, number in signs.items():
            if rank not in self._seen or self._seen[rank][0] != number:
                self._seen[rank] = (number, now_s)

    def silent_since(self) -> dict[int, float]:
        """Return the ranks that were looked for and gave no sign since, and when that began.

        Times are by ``time.monotonic``.
        """
        seen = dict(self._seen)  # the watch adds to it meanwhile
        numbers = self.signs(seen)
        return {rank: at_s for rank, (number, at_s) in seen.items() if numbers[rank] == number}

    def take_over(self, silent_since: Mapping[int, float]) -> None:
        """Count silences from when they began, as another roll of the same processes found."""
        for rank, number in self.signs(silent_since).items():
            self._seen[rank] = (number, silent_since[rank])

    def absences(self, ranks: Iterable[int]) -> dict[int, Absence]:
        """Return why ``ranks`` said nothing; if some may live, look at them a second time."""
        first = {rank: last_sign(self._store, rank) for rank in ranks}
        found = {rank: self._known(rank, sign) for rank, sign in first.items()}
        if None in found.values():
            time.sleep(1.5 * PULSE_S)
        return {
            rank: absence or self._guessed(rank, first[rank]) for rank, absence in found.items()
        }

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return which processes ended or are silent for too long, by rank, and why; at once.

        A process of this host that runs is not lost, however long it is silent. An exit reason
        alone does not count: a background thread may still work for a rank that ends its program.
        """
        found = {}
        for rank in ranks:
            sign = last_sign(self._store, rank)
            if sign is not None and sign.is_of_the_dead:
                found[rank] = DEAD
            elif not (sign is not None and sign.is_of_the_living):
                absence = self._silent(rank, "gave no sign of life")
                if absence.is_final:
                    found[rank] = absence.why
        return found

    def signs(self, ranks: Iterable[int]) -> dict[int, int]:
        """Return the numbers of the last signs of life of ``ranks``."""
        signs = {rank: last_sign(self._store, rank) for rank in ranks}
        return {rank: -1 if sign is None else sign.number for rank, sign in signs.items()}

    def _known(self, rank: int, sign: Sign | None) -> Absence | None:
        if self._store.check([ended_key(rank)]):
            return Absence(self._store.get(ended_key(rank)).decode(), is_final=True)
        if sign is not None and sign.is_of_the_dead:
            return Absence(DEAD, is_final=True)
        if sign is not None and sign.is_of_the_stopped:
            return self._silent(rank, STOPPED)
        return None

    def _guessed(self, rank: int, before: Sign | None) -> Absence:
        if last_sign(self._store, rank) != before:
            return Absence("lives, but does not answer", is_final=False)
        if before is None:  # it may load data for any time; its launcher knows if it ended
            return Absence("has not begun to train yet", is_final=False)
        if before.is_of_the_living:
            return Absence("gives no sign of life, though its process lives", is_final=False)
        why = "gives no sign of life: it ended, was stopped, or is cut off"
        return self._silent(rank, why)._replace(least_wait_s=silence_s())

    def _silent(self, rank: int, why: str) -> Absence:
        """Return the absence of a rank that may come back; not when it was silent for too long."""
        self.saw(self.signs([rank]))
        silent_s = time.monotonic() - self._seen[rank][1]
        is_final = silent_s > silence_s()
        return Absence(f"{why}, for {silent_s:.0f} s" if is_final else why, is_final)


def ended_key(rank: int) -> str:
    """Return the key of the last words of ``rank``."""
    return f"fullshard/ended/{rank}"
