"""``Life``: what the user's training learns about the job, and reports to it, in one attempt.

``StateTransfer`` takes the state from the tensors of the surviving ranks, if these hold all of it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from fullshard.checkpoint import Checkpointer, CheckpointInfo, load_newest
from fullshard.checkpoint.format import decode, encode
from fullshard.checkpoint.saving import Collected, collected, save_collected
from fullshard.comm.text import counted, named_ranks
from fullshard.errors import (
    CheckpointError,
    ConfigError,
    FullshardError,
    LostRankError,
    UnsupportedError,
)

log = logging.getLogger("fullshard")

_MEMORY = Path("/dev/shm")


class _Snapshot(NamedTuple):
    """The state that one rank contributes: tensors and values, without the model and optimizer.

    Attributes:
        part: this rank's part of the state, with ranks numbered as in its attempt.
        original_ranks: the original ranks of all ranks of that attempt, by rank.
        step, extra: the arguments of ``Life.reached``; ``extra`` in JSON.
    """

    part: Collected
    original_ranks: Sequence[int]
    step: int
    extra: str


class StateTransfer:
    """The state of one attempt of a job, on its way to the next attempt.

    Between two attempts each rank has a snapshot: tensors only, no model and no process group. Once
    the surviving ranks have a new process group, they write the snapshots as one checkpoint to the
    memory of their machines, and load that checkpoint.

    Args:
        job: a name that no other job has.
    """

    def __init__(self, job: str) -> None:
        memory = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
        self._folder = memory / f"fullshard-{job}"
        self._tracked: tuple[nn.Module, Optimizer] | None = None
        self._reached: tuple[int, str] | None = None  # what the tracked ones have; None: in a step
        self._snapshot: _Snapshot | None = None

    def track(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Set the model and the optimizer whose state ``capture`` captures."""
        try:
            optimizer.register_step_pre_hook(self._will_step)
        except AttributeError as error:
            raise UnsupportedError(
                f"Life.load: {type(optimizer).__name__} does not support step hooks ({error}), "
                "which show whether a step is complete; pass the optimizer that it wraps"
            ) from error
        self._tracked, self._reached = (model, optimizer), None

    def _will_step(self, *_: object) -> None:
        self._reached = None  # until ``reached`` is called for the new step

    def reached(self, step: int, extra: Any) -> None:
        """Record that the model and the optimizer have the state of ``step``."""
        if self._tracked is not None:
            self._reached = step, json.dumps(encode(extra, "extra"), allow_nan=False)

    def capture(
        self, original_ranks: Sequence[int], rank: int, *, is_whole: bool = True
    ) -> int | None:
        """Capture the state of the tracked model and optimizer, and stop tracking them.

        Args:
            original_ranks: the original ranks of all ranks of this attempt, by rank.
            rank: the rank of this process.
            is_whole: False if weights may differ among ranks, whatever step was reached.

        Returns:
            The step whose state was captured; None if there is none.
        """
        tracked, self._tracked = self._tracked, None
        if tracked is not None and is_whole:
            self._snapshot = None
            if self._reached is not None:
                try:
                    part = collected(rank, len(original_ranks), *tracked).bare()
                    self._snapshot = _Snapshot(part, original_ranks, *self._reached)
                except FullshardError as error:
                    step = self._reached[0]
                    log.warning("the state of step %d cannot be captured: %s", step, error)
        return None if self._snapshot is None else self._snapshot.step

    def save(self, survivors: Sequence[int]) -> None:
        """Write the snapshots of the ``survivors``, original ranks, in their new process group.

        If some part of the state is on none of them, nothing is written, and a warning says so.

        Raises:
            LostRankError: another rank was lost meanwhile.
        """
        snapshot = self._snapshot
        assert snapshot is not None
        ranks = {snapshot.original_ranks.index(one): rank for rank, one in enumerate(survivors)}
        try:
            save_collected(
                self._folder / "step-0",
                lambda: snapshot.part.left_to(ranks),
                decode(json.loads(snapshot.extra)),
                step=snapshot.step,
            )
        except LostRankError:
            raise  # the next attempt tries again
        except FullshardError as error:
            self._warn(error)
        self._snapshot = None

    def can_save(self, steps: Sequence[int | None], *, warns: bool) -> bool:
        """Return whether to ``save`` the snapshots; drop this rank's if not.

        Args:
            steps: the different results of ``capture`` on the surviving ranks.
            warns: True if this rank logs the reason against it.
        """
        if len(steps) == 1 and steps[0] is not None:
            return True
        if warns and len(steps) > 1:
            found = ", ".join("in the middle of one" if one is None else str(one) for one in steps)
            log.warning(
                "the state of the surviving ranks cannot be transferred: they are at different "
                "steps (%s); falling back to the newest checkpoint",
                found,
            )
        self._snapshot = None
        return False

    def load(
        self,
        checkpointers: Sequence[Checkpointer],
        model: nn.Module,
        optimizer: Optimizer,
        *,
        strict: bool,
    ) -> CheckpointInfo | None:
        """Load the transferred state, or else the newest checkpoint; return its description."""
        loaded = None
        try:
            here = Checkpointer(self._folder, copies=1)
            loaded = load_newest([here], model, optimizer, strict=strict)
        except (CheckpointError, ConfigError) as error:  # e.g. no rank of a pipeline stage survived
            self._warn(error)
        self.discard()
        if loaded is None and checkpointers:
            loaded = load_newest(checkpointers, model, optimizer, strict=strict)
        return loaded

    def discard(self) -> None:
        """Remove the files that ``save`` wrote."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @staticmethod
    def _warn(error: FullshardError) -> None:
        log.warning(
            "the state of the surviving ranks cannot be transferred: %s; falling back to the "
            "newest checkpoint",
            error,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The reason for another attempt, and its cost."""

    why: str
    """The failure; the text numbers ranks as in the attempt that failed."""
    lost: tuple[int, ...]
    """The lost ranks, by their original ranks: those of the first attempt."""
    world: int
    """The number of surviving ranks."""
    steps_lost: int | None = None
    """The number of repeated steps; None before ``reached`` is called, or if it never was."""
    seconds: float | None = None
    """Seconds from the fault to the end of the next step; None before that."""


class Life:
    """One attempt at a training: one call of ``train`` by ``resilient``.

    Attributes:
        number: the number of this attempt, from 0.
        rank, world: the rank of this process and the number of ranks, in the default process group.
        restarts: one ``Restart`` for each attempt after the first.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        restarts: Sequence[Restart] = (),
        *,
        transfer: StateTransfer | None = None,
        reached: int | None = None,
        failed_at_s: float = 0.0,
    ) -> None:
        self.number = len(restarts)
        self.rank, self.world = rank, world
        self.restarts = tuple(restarts)
        self.last_step: int | None = None
        self._reached_before, self._failed_at_s = reached, failed_at_s
        self._transfer = transfer

    def load(
        self,
        checkpointers: Sequence[Checkpointer],
        model: nn.Module,
        optimizer: Optimizer,
        *,
        strict: bool = True,
    ) -> CheckpointInfo | None:
        """Load the newest state there is; the next attempt can take over the state of this one.

        After a fault, the state comes from the tensors of the surviving ranks. All of them must
        have the state of the same step, and together the whole state: because no rank was lost, or
        because replicas (HSDP) hold what the lost ranks held. Otherwise the state is that of the
        newest intact checkpoint of ``checkpointers``, loaded by ``load_newest``. All ranks must
        call this, before the first step.

        Args:
            checkpointers: the checkpoints to fall back to; may be empty.
            model, optimizer, strict: as for ``checkpoint.load``.

        Returns:
            The description of the loaded state, with the ``extra`` that was given to ``reached`` or
            to ``save``; None if there is nothing to load.

        Raises:
            UnsupportedError: the optimizer does not support step hooks.
            CheckpointError, ConfigError, LostRankError, ProtocolError: as ``load_newest`` does.
        """
        transfer = self._transfer
        if transfer is None:
            return load_newest(checkpointers, model, optimizer, strict=strict)
        load = transfer.load if self.number else load_newest
        loaded = load(checkpointers, model, optimizer, strict=strict)
        transfer.track(model, optimizer)
        if loaded is not None:
            transfer.reached(loaded.step, loaded.extra)
        return loaded

    def reached(self, step: int, extra: Any = None) -> None:
        """Report that ``step`` is complete: the next attempt can start from its state.

        Call this after the optimizer's step, before anything that waits for other ranks. The first
        call after a restart logs what the restart cost.

        Args:
            step: the number of the step.
            extra: what else a run needs to go on, as for ``checkpoint.save``.
        """
        if self._transfer is not None:
            self._transfer.reached(step, extra)
        if self.last_step is None and self.restarts:
            before = self._reached_before
            restart = dataclasses.replace(
                self.restarts[-1],
                steps_lost=None if before is None else max(0, before - step + 1),
                seconds=time.monotonic() - self._failed_at_s,
            )
            self.restarts = (*self.restarts[:-1], restart)
            if self.rank == 0:
                log.warning("%s", _resumed(restart, step))
        self.last_step = step


def _resumed(restart: Restart, step: int) -> str:
    lost = f" after losing original {named_ranks(restart.lost)}" if restart.lost else ""
    repeated = ""
    if restart.steps_lost is not None:
        verb = "was" if restart.steps_lost == 1 else "were"
        repeated = f", {counted(restart.steps_lost, 'step')} {verb} repeated"
    return (
        f"resumed on {counted(restart.world, 'rank')}{lost}; step {step} finished "
        f"{restart.seconds:.1f} s after the fault{repeated}"
    )
