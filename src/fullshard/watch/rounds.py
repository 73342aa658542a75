"""The rounds in which ranks say where they are and judge by it, through the store.

A rank rings: it adds 1 to a counter, which every watcher reads a few times a second. Then all say
where they are, the last one to do so, or the first to lose patience, judges by what was said, and
all take note of the same judgement. Answers and judgements bear the number of the ring, so that
none of an earlier round or job can be mistaken for one; each answer takes the place of the last.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from fullshard.comm.liveness import Liveness, ended_key
from fullshard.comm.own_store import own_store
from fullshard.comm.pulse import PULSE_S, patience_s
from fullshard.comm.store_round import StoreRound, multi_get
from fullshard.watch.diagnosis import UNDECIDED, Diagnosis, Kind, diagnose
from fullshard.watch.status import StatusReport

__all__ = ["ANSWER_S", "JUDGE_S", "Rounds"]

ANSWER_S = 2.0
"""How long a rank may take to answer."""
JUDGE_S = 2 * PULSE_S + 1.0
"""How long a judge may take."""
_FEW = 8
_RINGS = "fullshard/rings"


class Rounds:
    """The rounds of one job, as one of its ranks takes part in them.

    Attributes:
        is_over: True if this rank takes part no longer; set by who watches, from any thread.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self.is_over = False
        self._store = own_store()
        self._liveness = Liveness(self._store)
        self._store.delete_key(ended_key(rank))
        self._heard = self._store.add(_RINGS, 0)

    @property
    def num_rung(self) -> int:
        """The number of rounds that were rung for so far."""
        return int(self._store.add(_RINGS, 0))

    def ring(self, *, after: int) -> None:
        """Begin a round, unless this rank has taken part in one later than ``after``."""
        if self._heard <= after:
            number = self._store.add(_RINGS, 1)
            for one in range(self._heard + 1, number + 1):  # who added to it may have died since
                self._store.set(_ring_key(one), "")

    def next_begun(self) -> int | None:
        """Return the number of a round to take part in, each once; None if none has begun."""
        # By looks only: file stores grow by whatever else is asked.
        if self.is_over or not self._store.check([_ring_key(self._heard + 1)]):
            return None
        self._heard += 1
        return self._heard

    def repeat(self, number: int) -> None:
        """Let ``next_begun`` return ``number`` again: the store failed in that round."""
        self._heard = number - 1

    def say(self, number: int, own: StatusReport) -> None:
        """Say where this rank is; judge, if it is the last one to say so."""
        # The next answer takes the place of this one; a slow judge may still read it then.
        self._store.set(_answer_key(self._rank), f"{number} {own.encoded()}")
        missing = self._world - self._store.add(f"fullshard/said/{number}", 1)
        # Not all ranks look for all others: where many are dead, patience ends the round.
        if missing == 0 or (missing <= _FEW and missing <= len(self._dead(number))):
            self._judge(number, 0)

    def judgement(self, number: int) -> Diagnosis:
        """Wait for the judgement of a round, and return it; judge, if nobody else does."""
        until_s, attempt = time.monotonic() + ANSWER_S, 1

        def look() -> None:
            nonlocal until_s, attempt
            if self.is_over:
                raise _Over
            if time.monotonic() > until_s:
                self._judge(number, attempt)
                until_s, attempt = time.monotonic() + JUDGE_S, attempt + 1

        try:
            told = self._round(number).decision(look)
        except _Over:  # nobody judges any more
            return UNDECIDED
        kind, ranks, text, behind, signs = json.loads(told)
        self._liveness.saw(dict(signs))
        return Diagnosis(Kind(kind), tuple(ranks), text, tuple(behind))

    def silent_since(self) -> dict[int, float]:
        """Return what ``Liveness.silent_since`` does."""
        return self._liveness.silent_since()

    def leave(self, how: str) -> None:
        """Tell how this rank ends."""
        self._store.set(ended_key(self._rank), how)

    def _dead(self, number: int) -> list[int]:
        """Return the ranks that ended, as far as this host knows, and have not answered."""
        return [
            rank
            for rank in range(self._world)
            if rank != self._rank
            and self._liveness.is_dead(rank)
            and not self._answers(number, [rank])
        ]

    def _answers(self, number: int, ranks: Sequence[int]) -> dict[int, str]:
        """Return what ``ranks`` have said in round ``number``, encoded, by rank."""
        keys = {rank: _answer_key(rank) for rank in ranks}
        if not self._store.check([*keys.values()]):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        found = {}
        for rank, answer in zip(keys, multi_get(self._store, [*keys.values()]), strict=True):
            its, text = answer.split(" ", 1)
            if int(its) == number:
                found[rank] = text
        return found

    def _judge(self, number: int, attempt: int) -> None:
        """Judge by what was said in round ``number``, unless another rank does.

        A judge may end before it has judged; then there is another ``attempt``.
        """
        now = self._round(number)
        if self.is_over or now.is_decided:
            return  # who is late may be the last one to speak of what all others know
        if self._store.add(f"fullshard/judges/{number}/{attempt}", 1) > 1:
            return
        said = self._answers(number, range(self._world))
        silent = [rank for rank in range(self._world) if rank not in said]
        found = diagnose(
            {rank: StatusReport.decoded(text) for rank, text in said.items()},
            self._liveness.absences(silent),
            patience_s=patience_s(),
        )
        signs = self._liveness.signs(silent)
        now.decide_once(json.dumps([found.kind.value, *found[1:], [*signs.items()]]))

    def _round(self, number: int) -> StoreRound:
        return StoreRound(self._store, f"fullshard/round/{number}")


class _Over(Exception):
    """This rank takes part no longer."""


def _ring_key(number: int) -> str:
    return f"fullshard/ring/{number}"


def _answer_key(rank: int) -> str:
    return f"fullshard/answer/{rank}"
