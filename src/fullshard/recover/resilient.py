"""Calls a training again when a rank of the job failed, with the ranks that are left."""

from __future__ import annotations

import gc
import logging
import secrets
import time
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from fullshard import watch
from fullshard.comm import ledger
from fullshard.comm.blocking import all_gather_bytes
from fullshard.comm.ledger import now
from fullshard.errors import ConfigError, LostRankError, PeerError, TornStepError
from fullshard.recover.life import Life, Restart
from fullshard.recover.transfer import StateTransfer
from fullshard.recover.vote import End, Next, Said, Verdict, Voter
from fullshard.recover.world import Origin, join, leave

log = logging.getLogger("fullshard")

Result = TypeVar("Result")


def resilient(
    train: Callable[[Life], Result], *, max_restarts: int = 3, min_world: int = 1
) -> Result:
    """Return what ``train`` returns; call it again with the ranks that are left if one is lost.

    All ranks call this, with a default process group whose store outlives each of them: torchrun's,
    or one that the launcher keeps. When a process ended or hangs, the others leave their process
    groups, agree on who is left, take new ranks in the same order, make a new default process group
    and call ``train`` again, in the same processes. So they do, with the same ranks, if a step
    failed on one rank and nobody caught that. An exception that all ranks raise by themselves is
    raised.

    Args:
        train: builds the model for the ranks that there are, loads the newest state (``Life.load``)
            and trains; calls ``Life.reached`` after each step. What it makes must end with it:
            nothing outside may hold a model, a mesh or a process group.
        max_restarts: how often ``train`` may be called again.
        min_world: how many ranks must be left for that.

    Raises:
        ConfigError: an argument has no meaning, or there is no default process group.
        LostRankError: too few are left, or the store is gone; or the others went on without this
            rank, as it did not come in time.
        PeerError: too many restarts; the last fault, on all ranks.
        Exception: what ``train`` raised, if all ranks raised. Then no process group is left.
    """
    for name, value, least in (("max_restarts", max_restarts, 0), ("min_world", min_world, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"resilient({name}={value!r}): expected an int of at least {least}")
    if not dist.is_initialized():
        raise ConfigError(
            "resilient: there is no default process group; call init_process_group before"
        )
    return _Job(train, max_restarts, min_world).run()


class _Job(Generic[Result]):
    """A job from its first life to its last, as one of its members."""

    def __init__(self, train: Callable[[Life], Result], max_restarts: int, min_world: int) -> None:
        self._train, self._max_restarts, self._min_world = train, max_restarts, min_world
        self._origin = Origin.found()
        self._member = dist.get_rank()
        self._members = tuple(range(dist.get_world_size()))
        # Ranks may have met in this store before: use other keys.
        own = torch.tensor([*secrets.token_bytes(8)], dtype=torch.uint8)
        names = all_gather_bytes(own, "the name of a job")
        self._name = f"fullshard/resilient/{bytes(names[0].tolist()).hex()}"
        self._transfer = StateTransfer(self._name.replace("/", "-"))
        self._life = Life(self._member, len(self._members), transfer=self._transfer)
        self._has_state_to_save = False
        self._ended_at_s = 0.0
        self._voter = Voter(
            dist.PrefixStore(self._name, self._origin.store),
            self._member,
            limit_s=self._origin.timeout.total_seconds(),
        )

    def run(self) -> Result:
        """Live until the job is over, or cannot go on."""
        exit_reason = "returned from resilient"
        watch.begin()
        try:
            while True:
                result, error, said = self._live()
                verdict = self._voter.vote(self._life.number, self._members, said)
                if verdict.next is not Next.AGAIN:
                    self._transfer.discard()
                if verdict.next is Next.OVER:
                    assert result is not None
                    return result[0]
                if verdict.next is Next.RAISE and error is not None:
                    raise error
                if error is None:
                    result = None
                    leave(None)
                self._go_on(verdict, error)
                error = None
                gc.collect()  # a traceback keeps closures, and these may keep the model
        except BaseException as last:
            exit_reason = f"left resilient with {type(last).__name__}: {last}"
            raise
        finally:
            self._voter.leave(exit_reason, self._members)

    def _live(self) -> tuple[tuple[Result] | None, Exception | None, Said]:
        """Call the training once; leave the process groups if it failed."""
        era, rank = now(), self._life.rank
        try:
            if self._life.number and not dist.is_initialized():
                name = f"{self._name}/{self._life.number}"
                join(self._origin, name, rank, len(self._members))
            if self._has_state_to_save:
                self._transfer.save(self._members)
            result = self._train(self._life)
            return (result,), None, Said(End.DONE, step=self._transfer.capture(self._members, rank))
        except Exception as error:
            failure = error
        finally:
            self._ended_at_s = time.monotonic()
        if era.error is None:
            watch.report_failure(failure)
        is_known = isinstance(failure, PeerError) or era.error is not None
        frame = traceback.extract_tb(failure.__traceback__)[-1]
        # Devices may have stepped weights by what came of collectives that were ended.
        is_whole = not isinstance(failure, TornStepError) and ledger.ended_by() is None
        step = self._transfer.capture(self._members, rank, is_whole=is_whole)
        watching = watch.watcher()
        if watching is not None:
            silent = watching.silent_since()
            self._voter.take_over({self._members[one]: at_s for one, at_s in silent.items()})
        leave(failure)
        kind = type(failure).__name__
        place = f"{kind} {frame.filename}:{frame.lineno}"
        end = End.FAULT if is_known else End.RAISED
        return None, failure, Said(end, f"{kind}: {failure}", place, step)

    def _go_on(self, verdict: Verdict, error: Exception | None) -> None:
        """Begin the next life, for those who are left.

        Raises:
            PeerError: it may not begin.
        """
        lost = "; ".join(f"rank {one} {why}" for one, why in verdict.lost.items())
        why = "; ".join(filter(None, [lost, verdict.why]))
        refusal = self._refusal(len(verdict.members))
        if refusal is not None:
            self._transfer.discard()
            kind = type(error) if isinstance(error, LostRankError) else PeerError
            raise kind(f"the job does not go on, as {refusal}: {why}") from error
        is_first = self._member == verdict.members[0]
        if is_first:
            log.warning("the job begins anew with %d rank(s): %s", len(verdict.members), why)
        self._has_state_to_save = self._transfer.can_save(verdict.steps, warns=is_first)
        restart = Restart(why=why, lost=tuple(verdict.lost), world=len(verdict.members))
        life = self._life
        self._members = verdict.members
        self._life = Life(
            self._members.index(self._member),
            len(self._members),
            (*life.restarts, restart),
            transfer=self._transfer,
            reached=life.last_step,
            failed_at_s=self._ended_at_s,
        )

    def _refusal(self, num_left: int) -> str | None:
        if self._life.number >= self._max_restarts:
            return f"max_restarts={self._max_restarts} are over"
        if num_left < self._min_world:
            return f"{num_left} rank(s) are left, fewer than min_world={self._min_world}"
        return None
