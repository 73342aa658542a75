"""Membership: the vote, at the end of an attempt, on the next one and the ranks in it.

The ranks use a store that outlives each of them. Each rank publishes how its attempt ended. The
first rank that sees the votes of all live ranks writes the decision; compare-and-set keeps later
writers from replacing it, and all ranks follow it. A rank may die at any moment: if it dies after
the decision, the other ranks notice in the next attempt, at the latest in its vote.

A *member* is a rank by its original number, that of the first attempt.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

from fullshard.comm.heartbeat import Heartbeat
from fullshard.comm.liveness import DEAD, Liveness, exit_reason_key, losing_ranks
from fullshard.comm.own_store import OwnStore
from fullshard.comm.store_round import Missing, StoreRound
from fullshard.comm.text import named_ranks
from fullshard.errors import LostRankError

log = logging.getLogger("fullshard")

_POLL_S = 0.01
_ASK_S = 0.25  # between two checks for lost members and for the decision of another one
_LOOK_S = 2.0  # between two checks for lost members on other hosts
_WARN_S = 30.0
_LEAVE_S = 5.0
_NO_STORE = (
    "resilient: the store of the process group does not answer, so the remaining ranks cannot "
    "agree. The store must outlive every rank: let the launcher keep it, as torchrun does, or pass "
    "init_process_group a TCPStore(is_master=False) whose server runs in another process"
)


class Outcome(enum.Enum):
    """How the attempt of a member ended."""

    DONE = "done"
    """The training returned."""
    FAULT = "fault"
    """A fault ended it that other ranks know of."""
    RAISED = "raised"
    """An exception of this member ended it."""


class Next(enum.Enum):
    """The next action of the members."""

    OVER = "over"
    """All members that are left are done."""
    RAISE = "raise"
    """Each raises its own exception: no member was lost, and all failed at the same place."""
    AGAIN = "again"
    """The training is called again."""


class Decision(NamedTuple):
    """The result of a vote: the next action, and the members that take part."""

    next: Next
    members: tuple[int, ...]
    """The members that are left, in the order of their new ranks."""
    lost: Mapping[int, str]
    """The members that were lost, and why."""
    why: str
    """The failure: of the first member that a fault ended, else of the first that has a text."""
    steps: tuple[int | None, ...] = ()
    """The steps whose state members keep, each once; None if a member keeps none."""


class Vote(NamedTuple):
    """How an attempt ended for one member."""

    outcome: Outcome
    text: str = ""
    """The exception."""
    place: str = ""
    """Its class and place; equal for members that failed at the same place."""
    step: int | None = None
    """The step whose state this member keeps for the next attempt; None if it keeps none."""


class Membership:
    """One member and its connection to the store of the job.

    Args:
        limit_s: seconds to wait for live members once one has failed.
    """

    def __init__(self, store: dist.Store, member: int, *, limit_s: float) -> None:
        self._member = member
        self._limit_s = limit_s
        self._store = OwnStore(store)
        self._liveness = Liveness(self._store)
        self._heartbeat = Heartbeat(self._store, member)

    def take_over(self, silent_since: Mapping[int, float]) -> None:
        """Count silences of members from these times of ``time.monotonic``."""
        with losing_ranks(_NO_STORE):
            self._liveness.take_over(silent_since)

    def leave(self, reason: str, members: Sequence[int]) -> None:
        """Publish that this member votes no more; ``reason`` is a clause without its subject.

        The first member, whose process may keep the store, waits until the other ``members`` left.
        """
        self._heartbeat.end()
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self._store.set(exit_reason_key(self._member), reason)
            until_s = time.monotonic() + _LEAVE_S
            while self._member == 0 and time.monotonic() < until_s:
                if all(self._liveness.is_dead(one) for one in members):
                    return
                time.sleep(_POLL_S)

    def vote(self, attempt: int, members: Sequence[int], own: Vote) -> Decision:
        """Publish the vote of this member on ``attempt``; return the decision of all ``members``.

        Raises:
            LostRankError: the store is gone, or the other members did not wait for this one.
        """
        with losing_ranks(_NO_STORE):
            now = StoreRound(self._store, f"{attempt}")
            now.publish(self._member, json.dumps([own.outcome.value, *own[1:]]))
            decision = self._decided(now, members)
        if self._member not in decision.members:
            raise LostRankError(
                f"the other ranks go on without this one, which {decision.lost[self._member]}"
            )
        return decision

    def _decided(self, now: StoreRound, members: Sequence[int]) -> Decision:
        """Wait for the decision, or for the votes of all live members, and decide then."""
        began_s = warned_s = looked_s = asked_s = time.monotonic()
        lost: dict[int, str] = {}

        def look(missing: Missing) -> Collection[int]:
            nonlocal warned_s, looked_s, asked_s
            if time.monotonic() - asked_s < _ASK_S:
                return ()
            asked_s = time.monotonic()
            if now.is_decided:
                return members
            awaited = missing()
            gone = [one for one in awaited if self._liveness.is_dead(one)]
            lost.update((one, why.why) for one, why in self._liveness.no_reports(gone).items())
            now_s = time.monotonic()
            if now_s - looked_s > _LOOK_S:
                looked_s = now_s
                found = self._liveness.no_reports([one for one in awaited if one not in lost])
                lost.update((one, why.why) for one, why in found.items() if why.is_final)
            if now_s - warned_s > _WARN_S:
                warned_s = now_s
                log.warning("resilient: still waiting for the vote of %s", named_ranks(awaited))
            if now_s - began_s > self._limit_s and any(
                vote.outcome is not Outcome.DONE for vote in _votes(now, members).values()
            ):
                why = f"is alive, but did not vote within {self._limit_s:g} s"
                lost.update((one, why) for one in awaited if one not in lost)
            return lost

        now.collect(members, look)
        return self._decide(now, members, lost)

    def _decide(self, now: StoreRound, members: Sequence[int], lost: Mapping[int, str]) -> Decision:
        """Write a decision, unless there is one; return the one in the store."""
        votes = {one: vote for one, vote in _votes(now, members).items() if one not in lost}
        gone = {one: why for one, why in lost.items() if one not in votes}
        gone |= {one: DEAD for one in votes if one != self._member and self._liveness.is_dead(one)}
        own = _decision({one: vote for one, vote in votes.items() if one not in gone}, gone)
        text = json.dumps([own.next.value, own.members, [*own.lost.items()], *own[3:]])
        following, left, lost_pairs, why, steps = json.loads(now.decide_once(text))
        return Decision(Next(following), tuple(left), dict(lost_pairs), why, tuple(steps))


def _votes(now: StoreRound, members: Sequence[int]) -> dict[int, Vote]:
    return {
        one: Vote(Outcome(outcome), *rest)
        for one, text in now.published(members).items()
        for outcome, *rest in [json.loads(text)]
    }


def _decision(votes: Mapping[int, Vote], lost: Mapping[int, str]) -> Decision:
    """Return what follows from these votes."""
    outcomes = {vote.outcome for vote in votes.values()}
    why = next((vote.text for vote in votes.values() if vote.outcome is Outcome.FAULT), "")
    why = why or next((vote.text for vote in votes.values() if vote.text), "")
    places = {vote.place for vote in votes.values()}
    following = Next.AGAIN
    if outcomes == {Outcome.DONE}:
        following = Next.OVER
    elif outcomes == {Outcome.RAISED} and not lost and len(places) == 1:
        following = Next.RAISE
    steps = tuple(dict.fromkeys(vote.step for vote in votes.values()))
    return Decision(following, tuple(sorted(votes)), dict(lost), why, steps)
