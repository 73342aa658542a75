"""How all ranks of a job find, at the end of a life, what comes next, and who is left.

They talk through a store that outlives any of them. Each says how its life ended. Who finds that
all have spoken that ever will writes down what comes next, unless another has done so: the store
takes the first, and all do what stands there. So it does not matter who dies meanwhile; who dies
afterwards is missed in the next life, and at its end.

Here ranks are *members*: they keep the numbers that they had when the job began.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist

from fullshard.comm.liveness import DEAD, Liveness, ended_key
from fullshard.comm.own_store import OwnStore
from fullshard.comm.pulse import Pulse
from fullshard.comm.store_round import Missing, StoreRound
from fullshard.errors import LostRankError

log = logging.getLogger("fullshard")

_POLL_S = 0.01
_ASK_S = 0.25  # so often the store is asked who ended, and for the verdict of another member
_LOOK_S = 2.0  # so long after the first, ranks of other hosts are looked for
_TELL_S = 30.0
_PART_S = 5.0


class End(enum.Enum):
    """How the life of a member ended."""

    DONE = "done"
    """The training returned."""
    FAULT = "fault"
    """By a fault that other ranks know of."""
    RAISED = "raised"
    """By an exception of its own."""


class Next(enum.Enum):
    """The next thing to do."""

    OVER = "over"
    """All who are left are done."""
    RAISE = "raise"
    """Each raises what it has raised: nobody was lost, and all failed by themselves, alike."""
    AGAIN = "again"
    """The training is called again."""


class Verdict(NamedTuple):
    """The next thing to do, and the members that do it."""

    next: Next
    members: tuple[int, ...]
    """Who is left, in the order of their new ranks."""
    lost: Mapping[int, str]
    """Who is not, and why."""
    why: str
    """The failure, in the words of the first member that failed."""
    steps: tuple[int | None, ...] = ()
    """The steps whose state those who are left keep, each once; None: one keeps nothing."""


class Said(NamedTuple):
    """How a life ended for one member."""

    end: End
    text: str = ""
    """The exception."""
    place: str = ""
    """Its class, and where it was raised: equal for members that failed alike."""
    step: int | None = None
    """The step whose state this member keeps for the next life; None if it keeps nothing."""


class Voter:
    """One member, and the store through which it talks.

    Args:
        limit_s: how long to wait for members that live, once one has failed, in seconds.
    """

    def __init__(self, store: dist.Store, member: int, *, limit_s: float) -> None:
        self._member = member
        self._limit_s = limit_s
        self._store = OwnStore(store)
        self._liveness = Liveness(self._store)
        self._pulse = Pulse(self._store, member)

    def take_over(self, silent_since: Mapping[int, float]) -> None:
        """Count the silences of members from when they began, by ``time.monotonic``."""
        with _store_answers():
            self._liveness.take_over(silent_since)

    def leave(self, how: str, members: Sequence[int]) -> None:
        """Tell that this member will not vote any more, and ``how`` it left: a clause.

        The first one, whose process may keep the store, lets the other ``members`` leave before.
        """
        self._pulse.end()
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self._store.set(ended_key(self._member), how)
            until_s = time.monotonic() + _PART_S
            while self._member == 0 and time.monotonic() < until_s:
                if all(self._liveness.is_dead(one) for one in members):
                    return
                time.sleep(_POLL_S)

    def vote(self, life: int, members: Sequence[int], said: Said) -> Verdict:
        """Say how ``life`` ended here, and return what comes next, the same on all ``members``.

        Raises:
            LostRankError: the store is gone; or the others did not wait for this member.
        """
        with _store_answers():
            now = StoreRound(self._store, f"{life}")
            now.publish(self._member, json.dumps([said.end.value, *said[1:]]))
            verdict = self._awaited(now, members)
        if self._member not in verdict.members:
            raise LostRankError(
                f"the other ranks go on without this one, which {verdict.lost[self._member]}"
            )
        return verdict

    def _awaited(self, now: StoreRound, members: Sequence[int]) -> Verdict:
        """Wait until the verdict is there, or all have spoken that will; then write it."""
        began_s = told_s = looked_s = asked_s = time.monotonic()
        lost: dict[int, str] = {}

        def look(missing: Missing) -> Collection[int]:
            nonlocal told_s, looked_s, asked_s
            if time.monotonic() - asked_s < _ASK_S:
                return ()
            asked_s = time.monotonic()
            if now.is_decided:
                return members
            awaited = missing()
            gone = [one for one in awaited if self._liveness.is_dead(one)]
            lost.update((one, why.why) for one, why in self._liveness.absences(gone).items())
            now_s = time.monotonic()
            if now_s - looked_s > _LOOK_S:
                looked_s = now_s
                found = self._liveness.absences([one for one in awaited if one not in lost])
                lost.update((one, why.why) for one, why in found.items() if why.is_final)
            if now_s - told_s > _TELL_S:
                told_s = now_s
                log.warning("waiting for rank(s) %s, who live", ", ".join(map(str, awaited)))
            if now_s - began_s > self._limit_s and self._has_failed(now, members):
                why = f"lives, but did not come in {self._limit_s:g} s"
                lost.update((one, why) for one in awaited if one not in lost)
            return lost

        now.collect(members, look)
        return self._written(now, members, lost)

    def _has_failed(self, now: StoreRound, members: Sequence[int]) -> bool:
        return any(one.end is not End.DONE for one in _said(now, members).values())

    def _written(self, now: StoreRound, members: Sequence[int], lost: Mapping[int, str]) -> Verdict:
        """Write the verdict, unless another member has; return what stands there."""
        said = {one: what for one, what in _said(now, members).items() if one not in lost}
        gone = {one: why for one, why in lost.items() if one not in said}
        gone |= {one: DEAD for one in said if one != self._member and self._liveness.is_dead(one)}
        own = _judged({one: what for one, what in said.items() if one not in gone}, gone)
        text = json.dumps([own.next.value, own.members, [*own.lost.items()], *own[3:]])
        return _decoded(now.decide_once(text))


def _said(now: StoreRound, members: Sequence[int]) -> dict[int, Said]:
    return {
        one: Said(End(end), *rest)
        for one, text in now.published(members).items()
        for end, *rest in [json.loads(text)]
    }


def _judged(said: Mapping[int, Said], lost: Mapping[int, str]) -> Verdict:
    """Return what comes next."""
    ends = {one.end for one in said.values()}
    why = next((one.text for one in said.values() if one.end is End.FAULT), "")
    why = why or next((one.text for one in said.values() if one.text), "")
    following = Next.AGAIN
    if ends == {End.DONE}:
        following = Next.OVER
    elif ends == {End.RAISED} and not lost and len({one.place for one in said.values()}) == 1:
        following = Next.RAISE
    steps = tuple(dict.fromkeys(one.step for one in said.values()))
    return Verdict(following, tuple(sorted(said)), dict(lost), why, steps)


def _decoded(text: str) -> Verdict:
    following, members, lost, why, steps = json.loads(text)
    return Verdict(Next(following), tuple(members), dict(lost), why, tuple(steps))


@contextmanager
def _store_answers() -> Iterator[None]:
    try:
        yield
    except LostRankError:
        raise
    except RuntimeError as error:  # torch's DistError
        raise LostRankError(
            f"resilient: the store of the process group does not answer ({error}), so the ranks "
            "that are left cannot meet. It has to outlive every rank: let the launcher keep it, as "
            "torchrun does, or give init_process_group a TCPStore(is_master=False) of another "
            "process"
        ) from error
