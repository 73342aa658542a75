"""``Life``: what the user's training learns about the job, and reports to it, in one attempt."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fullshard.checkpoint import Checkpointer, CheckpointInfo, load_newest
from fullshard.comm.text import counted, named_ranks
from fullshard.recover.transfer import StateTransfer

log = logging.getLogger("fullshard")


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
