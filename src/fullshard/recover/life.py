"""Tell a training about the job that calls it, and let it tell how far it is."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fullshard.checkpoint import Checkpointer, CheckpointInfo, load_newest
from fullshard.recover.transfer import StateTransfer

log = logging.getLogger("fullshard")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Why a training was called again, and what that cost."""

    why: str
    """The failure, as a text in which ranks have the numbers that they had then."""
    lost: tuple[int, ...]
    """The ranks that are gone, by the numbers that they had when the job began."""
    world: int
    """How many ranks are left."""
    steps_lost: int | None = None
    """Steps done again; None while that is not known, or if ``reached`` was not called."""
    seconds: float | None = None
    """From the fault to the end of the first step afterwards; None while that is not known."""


class Life:
    """The job between two faults: one call of the training.

    Attributes:
        number: how often the training was called before.
        rank, world: this rank's number, and how many there are; those of the default process group.
        restarts: why it was called again, each time.
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
        """Load the newest state there is, and hand this one's on to the next life.

        After a fault that is the state in the tensors of the ranks that are left, if they all have
        that of one step, and together all of it, as replicas (HSDP) have, or if no rank was lost.
        Else it is the newest intact checkpoint of ``checkpointers``, as ``load_newest`` loads it.
        All ranks must call this, before the first step.

        Args:
            checkpointers: may be none.
            model, optimizer, strict: as for ``checkpoint.load``.

        Returns:
            Its description, whose ``extra`` is the one given to ``reached`` or ``save``; None if
            there is nothing to load.

        Raises:
            UnsupportedError: the optimizer takes no hooks.
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
        """Tell that ``step`` is done; the first call after a restart says what that has cost.

        To be called when the optimizer has stepped, before anything for which ranks wait: from then
        on the next life can go on from here.

        Args:
            step: its number.
            extra: what else a run needs to go on, as for ``checkpoint.save``.
        """
        if self._transfer is not None:
            self._transfer.reached(step, extra)
        if self.last_step is None and self.restarts:
            before = self._reached_before
            told = dataclasses.replace(
                self.restarts[-1],
                steps_lost=None if before is None else max(0, before - step + 1),
                seconds=time.monotonic() - self._failed_at_s,
            )
            self.restarts = (*self.restarts[:-1], told)
            if self.rank == 0:
                log.warning("%s", _told(told, step))
        self.last_step = step


def _told(restart: Restart, step: int) -> str:
    lost = f", without rank(s) {', '.join(map(str, restart.lost))} of the first" * bool(
        restart.lost
    )
    again = "" if restart.steps_lost is None else f", {restart.steps_lost} step(s) were lost"
    return (
        f"the job goes on with {restart.world} rank(s){lost}: step {step} is done "
        f"{restart.seconds:.1f} s after the fault{again}"
    )
