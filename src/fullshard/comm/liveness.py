"""Evidence about ranks that do not answer: exit reasons, heartbeats, processes of this host."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist

from fullshard.comm.heartbeat import BEAT_S, Beat, last_beat, patience_s, silence_s
from fullshard.errors import FullshardError, LostRankError

__all__ = ["DEAD", "STOPPED", "Liveness", "NoReport", "exit_reason_key", "losing_ranks"]

DEAD = "ended without a word: killed, or it crashed"
STOPPED = "was stopped by a signal"


class NoReport(NamedTuple):
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
    has_begun: bool = True
    """False if the rank has not begun to train."""

    @property
    def may_train(self) -> bool:
        """True if the rank may be in a step, or may begin one."""
        return self.has_begun and not self.is_final


class Liveness:
    """The last known heartbeats of the ranks of a job."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._seen: dict[int, tuple[int, float]] = {}  # rank: number of a beat, first seen
        self._read: dict[int, tuple[Beat | None, float]] = {}  # by ``lost``: when to read it again

    def is_dead(self, rank: int) -> bool:
        """Return whether ``rank`` reported its exit, or ran on this host and has ended."""
        beat = last_beat(self._store, rank)
        is_gone = beat is not None and beat.has_ended
        return is_gone or self._store.check([exit_reason_key(rank)])

    def note(self, beats: Mapping[int, int]) -> None:
        """Record the numbers of the last heartbeats of ranks, which another rank may have read."""
        now_s = time.monotonic()
        for rank, number in beats.items():
            if rank not in self._seen or self._seen[rank][0] != number:
                self._seen[rank] = (number, now_s)

    def silent_since(self) -> dict[int, float]:
        """Return the ranks whose recorded heartbeat is still their last, and when it was seen.

        Times are by ``time.monotonic``.
        """
        seen = dict(self._seen)  # the watch adds to it at the same time
        numbers = self.beats(seen)
        return {rank: at_s for rank, (number, at_s) in seen.items() if numbers[rank] == number}

    def take_over(self, silent_since: Mapping[int, float]) -> None:
        """Start silences at these times, from another ``Liveness`` of the same processes."""
        for rank, number in self.beats(silent_since).items():
            self._seen[rank] = (number, silent_since[rank])

    def no_reports(self, ranks: Iterable[int]) -> dict[int, NoReport]:
        """Return why ``ranks`` did not report; look a second time if some may be alive."""
        first = {rank: last_beat(self._store, rank) for rank in ranks}
        found = {rank: self._known(rank, beat) for rank, beat in first.items()}
        if None in found.values():
            time.sleep(1.5 * BEAT_S)
        return {
            rank: no_report or self._guessed(rank, first[rank]) for rank, no_report in found.items()
        }

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return which processes ended or are silent for too long, by rank, and why; at once.

        A process of this host that runs is not lost, however long it is silent. An exit reason
        alone does not count: a background thread may still work for a rank that ends its program.

        Call it often: it asks the store for a rank's heartbeat only once every ``patience_s()``,
        and not at all once it has seen the process run on this host.
        """
        found = {}
        for rank in ranks:
            beat, next_s = self._read.get(rank, (None, 0.0))
            is_due = time.monotonic() >= next_s and not (beat is not None and beat.is_running)
            if is_due:
                beat = last_beat(self._store, rank)
                self._read[rank] = beat, time.monotonic() + patience_s()
            if beat is not None and beat.has_ended:
                found[rank] = DEAD
            elif is_due and not (beat is not None and beat.is_running):
                no_report = self._silent(rank, beat, "had no heartbeat")
                if no_report.is_final:
                    found[rank] = no_report.why
        return found

    def beats(self, ranks: Iterable[int]) -> dict[int, int]:
        """Return the numbers of the last heartbeats of ``ranks``; -1 if there was none."""
        return {rank: _number(last_beat(self._store, rank)) for rank in ranks}

    def _known(self, rank: int, beat: Beat | None) -> NoReport | None:
        if self._store.check([exit_reason_key(rank)]):
            return NoReport(self._store.get(exit_reason_key(rank)).decode(), is_final=True)
        if beat is not None and beat.has_ended:
            return NoReport(DEAD, is_final=True)
        if beat is not None and beat.is_stopped:
            return self._silent(rank, beat, STOPPED)
        return None

    def _guessed(self, rank: int, before: Beat | None) -> NoReport:
        if last_beat(self._store, rank) != before:
            return NoReport("lives, but does not answer", is_final=False)
        if before is None:  # it may load data for any time; the launcher knows whether it ended
            return NoReport("has not begun to train yet", is_final=False, has_begun=False)
        if before.is_running:
            return NoReport("has no heartbeat, though its process is alive", is_final=False)
        why = "has no heartbeat: it ended, was stopped, or cannot reach the store"
        return self._silent(rank, before, why)._replace(least_wait_s=silence_s())

    def _silent(self, rank: int, beat: Beat | None, why: str) -> NoReport:
        """Return why a rank whose last heartbeat is ``beat`` does not report.

        The reason is final after ``silence_s()`` without a newer one.
        """
        self.note({rank: _number(beat)})
        silent_s = time.monotonic() - self._seen[rank][1]
        is_final = silent_s > silence_s()
        return NoReport(f"{why}; silent for {silent_s:.0f} s" if is_final else why, is_final)


@contextmanager
def losing_ranks(message: str) -> Iterator[None]:
    """Raise an error of PyTorch as ``LostRankError``: ``message``, then its text in parentheses."""
    try:
        yield
    except FullshardError:
        raise
    except RuntimeError as error:
        raise LostRankError(f"{message} ({error})") from error


def _number(beat: Beat | None) -> int:
    return -1 if beat is None else beat.number


def exit_reason_key(rank: int) -> str:
    """Return the key of the exit reason of ``rank``."""
    return f"fullshard/ended/{rank}"
