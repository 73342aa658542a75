"""Poll rounds: all ranks publish their status through the store, and one of them diagnoses.

A rank triggers a round by setting a key that every watcher checks a few times a second. All ranks
then report their status. The last rank to report diagnoses; after ``ANSWER_S`` any rank may. The
first diagnosis in the store is the verdict of all ranks. Reports and verdicts carry the number of
their round, so a rank can tell them from those of earlier rounds and jobs. A rank's report replaces
its previous one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from fullshard.comm.heartbeat import BEAT_S, patience_s
from fullshard.comm.liveness import Liveness, exit_reason_key
from fullshard.comm.own_store import own_store
from fullshard.comm.store_round import StoreRound, multi_get, present
from fullshard.watch.diagnosis import UNDECIDED, Diagnosis, Kind, diagnose
from fullshard.watch.status import StatusReport

__all__ = ["ANSWER_S", "DIAGNOSE_S", "Rounds"]

ANSWER_S = 2.0
"""Seconds that a rank may take to report."""
DIAGNOSE_S = 2 * BEAT_S + 1.0
"""Seconds that a diagnosis may take."""
_FEW = 8
_NUM_TRIGGERED = "fullshard/rounds"


class Rounds:
    """The poll rounds of one job, for one of its ranks.

    Attributes:
        is_over: True if this rank takes part no longer; the watcher sets it, from any thread.
        liveness: the heartbeats of the job.
        last_fault: the number of the last round that found a fault; "0" if none did.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self.is_over = False
        self._store = own_store()
        self.liveness = Liveness(self._store)
        self._store.delete_key(exit_reason_key(rank))
        self._last, self.last_fault = self._last_decided()

    def _last_decided(self) -> tuple[int, str]:
        """Return the number of the last decided round, and of the last one that found a fault.

        Both are 0 if there is none. More rounds may have been triggered.
        """
        for number in range(int(self._store.add(_NUM_TRIGGERED, 0)), 0, -1):
            if self._round(number).is_decided:
                return number, json.loads(self._round(number).decision(lambda: None))[2]
        return 0, "0"

    @property
    def num_triggered(self) -> int:
        """The number of rounds that were triggered so far."""
        return int(self._store.add(_NUM_TRIGGERED, 0))

    def trigger(self, *, after: int) -> None:
        """Trigger a round, unless this rank has taken part in one later than ``after``."""
        if self._last <= after:
            number = self._store.add(_NUM_TRIGGERED, 1)
            for one in range(self._last + 1, number + 1):  # the rank that counted one may have died
                self._store.set(_trigger_key(one), "")

    def next_begun(self) -> int | None:
        """Return the number of the next round, once; None if it was not triggered yet."""
        # Use ``check`` only: every other call makes the file of a ``FileStore`` grow.
        if self.is_over or not self._store.check([_trigger_key(self._last + 1)]):
            return None
        self._last += 1
        return self._last

    def repeat(self, number: int) -> None:
        """Make ``next_begun`` return ``number`` again, because the store failed in that round."""
        self._last = number - 1

    def report(self, number: int, own: StatusReport) -> None:
        """Publish the status of this rank; diagnose if the others have reported or are dead."""
        # One key for all rounds: a slow rank may still read the reports of an earlier one.
        self._store.set(_report_key(self._rank), f"{number} {own.encoded()}")
        missing = self._world - self._store.add(f"fullshard/reported/{number}", 1)
        # With more than ``_FEW`` missing, none is looked up: ``ANSWER_S`` ends the round.
        if missing == 0 or (missing <= _FEW and missing <= len(self._dead(number))):
            self._diagnose(number, 0)

    def verdict(self, number: int) -> Diagnosis:
        """Wait for the verdict of a round and return it; diagnose if no other rank does."""
        until_s, attempt = time.monotonic() + ANSWER_S, 1

        def look() -> None:
            nonlocal until_s, attempt
            if self.is_over:
                raise _Over
            if time.monotonic() > until_s:
                self._diagnose(number, attempt)
                until_s, attempt = time.monotonic() + DIAGNOSE_S, attempt + 1

        try:
            told = self._round(number).decision(look)
        except _Over:
            return UNDECIDED
        (kind, ranks, text, behind), beats, self.last_fault = json.loads(told)
        self.liveness.note(dict(beats))
        silent = tuple(rank for rank, _ in beats)
        return Diagnosis(Kind(kind), tuple(ranks), text, tuple(behind), silent)

    def report_exit(self, reason: str) -> None:
        """Publish why this rank exits."""
        self._store.set(exit_reason_key(self._rank), reason)

    def _dead(self, number: int) -> list[int]:
        """Return the ranks without a report in this round that exited, or ended on this host."""
        reports = self._reports(number, range(self._world))
        silent = (rank for rank in range(self._world) if rank not in reports)
        return [rank for rank in silent if self.liveness.is_dead(rank)]

    def _reports(self, number: int, ranks: Sequence[int]) -> dict[int, str]:
        """Return the encoded reports of ``ranks`` in round ``number``, by rank."""
        rank_of = {_report_key(rank): rank for rank in ranks}
        keys = present(self._store, [*rank_of])
        found = {}
        for key, report in zip(keys, multi_get(self._store, keys), strict=True):
            its, text = report.split(" ", 1)
            if int(its) == number:
                found[rank_of[key]] = text
        return found

    def _diagnose(self, number: int, attempt: int) -> None:
        """Diagnose round ``number`` by its reports, unless another rank does.

        A rank may end before it publishes its diagnosis; another makes the next ``attempt``.
        """
        now = self._round(number)
        if self.is_over or now.is_decided:
            return  # another rank has decided without this one
        if self._store.add(f"fullshard/diagnosing/{number}/{attempt}", 1) > 1:
            return
        reports = self._reports(number, range(self._world))
        silent = [rank for rank in range(self._world) if rank not in reports]
        found = diagnose(
            {rank: StatusReport.decoded(text) for rank, text in reports.items()},
            self.liveness.no_reports(silent),
            patience_s=patience_s(),
        )
        beats = self.liveness.beats(silent)
        said = found.kind.value, found.ranks, found.text, found.behind
        last_fault = str(number) if found.is_fault else self.last_fault
        now.decide_once(json.dumps([said, [*beats.items()], last_fault]))

    def _round(self, number: int) -> StoreRound:
        return StoreRound(self._store, f"fullshard/round/{number}")


class _Over(Exception):
    """This rank takes part no longer."""


def _trigger_key(number: int) -> str:
    return f"fullshard/trigger/{number}"


def _report_key(rank: int) -> str:
    return f"fullshard/report/{rank}"
