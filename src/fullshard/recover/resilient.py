"""``resilient``: repeats a training after a fault, on the surviving ranks, in new groups."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fullshard import watch
from fullshard._torch import collectives as _collectives
from fullshard._torch import world as _world
from fullshard.checkpoint.saving import await_save
from fullshard.comm.blocking import drawn_name
from fullshard.comm.c10d import drop_transports
from fullshard.comm.fault_domain import fault_domain
from fullshard.comm.heartbeat import stall_s
from fullshard.comm.own_store import own_store
from fullshard.comm.text import counted
from fullshard.errors import ConfigError, FullshardError, LostRankError, PeerError, TornStepError
from fullshard.recover.life import Life, Restart, StateTransfer
from fullshard.recover.membership import Decision, Membership, Next, Outcome, Vote

log = logging.getLogger("fullshard")

Result = TypeVar("Result")


def resilient(
    train: Callable[[Life], Result], *, max_restarts: int = 3, min_world: int = 1
) -> Result:
    """Call ``train`` and return its result; after a fault call it again, on the surviving ranks.

    All ranks call this, in a default process group whose store outlives each of them: torchrun's
    store, or another one that the launcher keeps. When a process ends or hangs, the other ranks
    leave their process groups, agree on the list of survivors, and are renumbered in the same
    order. They make a new default process group and call ``train`` again, in the same processes.
    If a step fails on one rank and the error is not caught, all ranks do the same with no rank
    lost. If all ranks raise an exception of their own at the same place, that exception is raised.

    Args:
        train: builds the model for the present number of ranks, loads the newest state
            (``Life.load``), trains, and calls ``Life.reached`` after each step. The model, the
            meshes and the process groups that ``train`` makes must end with it: keep no reference
            to them outside.
        max_restarts: how often ``train`` may be called again.
        min_world: the number of surviving ranks that a restart needs.

    Raises:
        ConfigError: an argument has no meaning, or there is no default process group.
        LostRankError: too few ranks survive, or the store is gone, or the other ranks went on
            without this one because it answered too late.
        PeerError: all restarts are used up; the last fault, on all ranks.
        TorchVersionError: PyTorch lacks a private name that a restart needs.
        Exception: the exception of ``train``, if all ranks raised; no process group remains.
    """
    for name, value, least in (("max_restarts", max_restarts, 0), ("min_world", min_world, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"resilient({name}={value!r}): expected an int of at least {least}")
    if not dist.is_initialized():
        raise ConfigError(
            "resilient: there is no default process group; call init_process_group first"
        )
    _world.check_recovery()
    return _Job(train, max_restarts, min_world).run()


class _Job(Generic[Result]):
    """A job from its first attempt to its last, as one of its ranks takes part in it.

    In all attempts a process keeps its original rank, that of the first attempt, as its name.
    """

    def __init__(self, train: Callable[[Life], Result], max_restarts: int, min_world: int) -> None:
        self._train, self._max_restarts, self._min_world = train, max_restarts, min_world
        self._origin = _Origin.found()
        self._original_rank = dist.get_rank()
        self._original_ranks = tuple(range(dist.get_world_size()))  # of the present ranks, in order
        # An earlier job may have used this store: draw a new name for the keys.
        self._name = f"fullshard/resilient/{drawn_name('the name of a job')}"
        self._transfer = StateTransfer(self._name.replace("/", "-"))
        self._attempt = Life(
            self._original_rank, len(self._original_ranks), transfer=self._transfer
        )
        self._has_state_to_save = False
        self._ended_at_s = 0.0
        self._membership = Membership(
            dist.PrefixStore(self._name, self._origin.store),
            self._original_rank,
            limit_s=self._origin.timeout.total_seconds(),
        )

    def run(self) -> Result:
        """Run attempts until the job is complete or cannot be restarted."""
        exit_reason = "returned from resilient"
        watch.begin()
        try:
            while True:
                result, error, said = self._run_attempt()
                decision = self._membership.vote(self._attempt.number, self._original_ranks, said)
                if decision.next is not Next.AGAIN:
                    self._transfer.discard()
                if decision.next is Next.OVER:
                    assert result is not None
                    return result[0]
                if decision.next is Next.RAISE and error is not None:
                    raise error
                if error is None:
                    result = None
                    leave(None)
                self._prepare_attempt(decision, error)
                error = None
                gc.collect()  # a traceback keeps closures, which may keep the model
        except BaseException as last:
            exit_reason = f"left resilient with {type(last).__name__}: {last}"
            raise
        finally:
            self._membership.leave(exit_reason, self._original_ranks)

    def _run_attempt(self) -> tuple[tuple[Result] | None, Exception | None, Vote]:
        """Call the training once; leave the process groups if it failed."""
        domain, rank = fault_domain(), self._attempt.rank
        ranks, era = self._original_ranks, domain.era
        try:
            if self._attempt.number and not dist.is_initialized():
                join(self._origin, f"{self._name}/{self._attempt.number}", rank, len(ranks))
                domain = fault_domain()
                era = domain.era
            if self._has_state_to_save:
                self._transfer.save(ranks)
            result = self._train(self._attempt)
            return (result,), None, Vote(Outcome.DONE, step=self._transfer.capture(ranks, rank))
        except Exception as error:
            failure = error
        finally:
            self._ended_at_s = time.monotonic()
        if era.error is None:
            watch.report_failure(failure)
        is_known = isinstance(failure, PeerError) or era.error is not None
        frame = traceback.extract_tb(failure.__traceback__)[-1]
        # After an abort, devices may have stepped weights with results of aborted collectives.
        is_whole = not isinstance(failure, TornStepError) and domain.aborted_by is None
        step = self._transfer.capture(ranks, rank, is_whole=is_whole)
        watching = watch.watcher()
        if watching is not None:
            silent = watching.silent_since()
            self._membership.take_over({ranks[one]: at_s for one, at_s in silent.items()})
        leave(failure)
        kind = type(failure).__name__
        place = f"{kind} {frame.filename}:{frame.lineno}"
        end = Outcome.FAULT if is_known else Outcome.RAISED
        return None, failure, Vote(end, f"{kind}: {failure}", place, step)

    def _prepare_attempt(self, decision: Decision, error: Exception | None) -> None:
        """Prepare the next attempt, on the surviving ranks.

        Raises:
            PeerError: the limits of ``resilient`` allow no other attempt.
        """
        survivors = decision.members
        rank_of = self._original_ranks.index  # in this attempt, as in other messages of it
        lost = "; ".join(f"rank {rank_of(one)} {why}" for one, why in decision.lost.items())
        why = "; ".join(filter(None, [lost, decision.why]))
        refusal = self._refusal(len(survivors))
        if refusal is not None:
            self._transfer.discard()
            kind = type(error) if isinstance(error, LostRankError) else PeerError
            raise kind(f"the job cannot be restarted, as {refusal}: {why}") from error
        is_first = self._original_rank == survivors[0]
        if is_first:
            log.warning("restarting on %s: %s", counted(len(survivors), "rank"), why)
        self._has_state_to_save = self._transfer.can_save(decision.steps, warns=is_first)
        restart = Restart(why=why, lost=tuple(decision.lost), world=len(survivors))
        before = self._attempt
        self._original_ranks = survivors
        self._attempt = Life(
            survivors.index(self._original_rank),
            len(survivors),
            (*before.restarts, restart),
            transfer=self._transfer,
            reached=before.last_step,
            failed_at_s=self._ended_at_s,
        )

    def _refusal(self, num_left: int) -> str | None:
        if self._attempt.number >= self._max_restarts:
            return f"max_restarts={self._max_restarts} is reached"
        if num_left < self._min_world:
            verb = "survives" if num_left == 1 else "survive"
            return (
                f"only {counted(num_left, 'rank')} {verb}, fewer than min_world={self._min_world}"
            )
        return None


class _Origin(NamedTuple):
    """The arguments that the default process group was made with, to make others like it."""

    store: dist.Store
    backend: str
    timeout: timedelta
    options: Any
    device: torch.device | None

    @classmethod
    def found(cls) -> _Origin:
        """Return the arguments of the present default process group."""
        group = dist.group.WORLD
        assert group is not None
        device_type = next(iter(_collectives.device_types(group)))
        return cls(
            _world.default_store(),
            dist.get_backend_config(group),
            _collectives.timeout_of(group, device_type),
            _collectives.group_options(group),
            group.bound_device_id,
        )


def join(origin: _Origin, name: str, rank: int, world: int) -> None:
    """Make a default process group of ``world`` ranks; all of them call this with one ``name``.

    Raises:
        RuntimeError: PyTorch's, if a rank did not call this within ``stall_s``. Some NCCL groups
            connect later, in the first collective.
    """
    dist.init_process_group(
        origin.backend,
        store=dist.PrefixStore(name, origin.store),
        rank=rank,
        world_size=world,
        timeout=min(origin.timeout, timedelta(seconds=stall_s())),
        pg_options=_collectives.options_like(origin.options),  # a new object for each group
        device_id=origin.device,
    )
    group = dist.group.WORLD
    assert group is not None
    _world.set_timeout(group, origin.timeout)
    own_store().set_timeout(origin.timeout)
    for variable, value in (("RANK", rank), ("WORLD_SIZE", world)):
        if variable in os.environ:  # programs read the variables of their launcher
            os.environ[variable] = str(value)
    watch.begin()


def leave(error: BaseException | None) -> None:
    """Leave all process groups, which wakes ranks that wait for this one in PyTorch's collectives.

    A frame may hold a model, and the model its groups. So the local variables of the frames in the
    traceback of ``error`` are cleared.
    """
    try:
        await_save()  # ends a background save; on other ranks it runs until theirs ends, too
    except FullshardError as failure:
        log.warning("a checkpoint was not completed: %s", failure)
    _clear_frames(error)
    group = dist.group.WORLD
    old = None if group is None else weakref.ref(group)
    del group
    watching = watch.watcher()
    if watching is not None:
        watching.report_exit("has left its process groups")
    del watching
    gc.collect()  # models are reference cycles
    drop_transports()
    _world.drop_groups()
    gc.collect()
    if old is not None and _is_held(old()):
        log.warning(
            "an object still holds the previous process group, and perhaps a model, so their "
            "memory and threads are not freed. Keep no model, mesh or process group of train "
            "outside it"
        )


def _is_held(group: dist.ProcessGroup | None) -> bool:
    """Return whether a Python object other than a frame holds ``group``."""
    return group is not None and any(
        not isinstance(one, FrameType) for one in gc.get_referrers(group)
    )


def _clear_frames(error: BaseException | None) -> None:
    """Clear the local variables in the tracebacks of ``error`` and of the errors that led to it."""
    seen: set[int] = set()
    errors = [error]
    while errors:
        one = errors.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        with contextlib.suppress(RuntimeError):
            traceback.clear_frames(one.__traceback__)
        errors += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            errors += one.exceptions
