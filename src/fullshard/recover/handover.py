"""The state of a training in the tensors of ranks that live on, for the next life of the job."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from fullshard.checkpoint import Checkpointer, CheckpointInfo, load_newest
from fullshard.checkpoint.collecting import Collected, collected
from fullshard.checkpoint.saving import save_collected
from fullshard.checkpoint.values import decode, encode
from fullshard.errors import (
    CheckpointError,
    ConfigError,
    FullshardError,
    LostRankError,
    UnsupportedError,
)

log = logging.getLogger("fullshard")

_MEMORY = Path("/dev/shm")


class _Kept(NamedTuple):
    """A rank's part of a model and of an optimizer, without both.

    Attributes:
        found: the part; ranks in it are those of the life.
        members: those who lived it, in the order of their ranks.
        step, extra: as ``Life.reached`` was given them; ``extra`` in JSON.
    """

    found: Collected
    members: Sequence[int]
    step: int
    extra: str

    def left_to(self, members: Sequence[int]) -> Collected:
        """Return what this rank has to write if these ``members`` are left."""
        return self.found.left_to(
            {self.members.index(one): rank for rank, one in enumerate(members)}
        )


class _Held:
    """A model and its optimizer, and the step whose state they have."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._step: int | None = None
        self._extra = ""
        try:
            optimizer.register_step_pre_hook(self._will_step)
        except AttributeError as error:
            raise UnsupportedError(
                f"Life.load: {type(optimizer).__name__} takes no hooks ({error}), so nobody would "
                "know whether its step is over; give the optimizer that it wraps"
            ) from error

    def _will_step(self, *_: object) -> None:
        self._step = None  # until it is told that the step is over

    def reached(self, step: int, extra: Any) -> None:
        self._step, self._extra = step, json.dumps(encode(extra, "extra"), allow_nan=False)

    def kept(self, members: Sequence[int], rank: int) -> _Kept | None:
        """Return what ``rank``, this one, has of a step that is over, if it is."""
        if self._step is None:
            return None
        try:
            found = collected(rank, len(members), self._model, self._optimizer)
        except FullshardError as error:
            log.warning("the state of step %d cannot be kept: %s", self._step, error)
            return None
        return _Kept(found.bare(), members, self._step, self._extra)


class Handover:
    """Brings the state of one life of a job to the next one.

    Between them a rank keeps its tensors, and no model or group. When the ranks that are left have
    met, they write a checkpoint of it to the memory of their machines, and load that.

    Args:
        job: a name that no other job has.
    """

    def __init__(self, job: str) -> None:
        memory = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
        self._folder = memory / f"fullshard-{job}"
        self._held: _Held | None = None
        self._kept: _Kept | None = None

    def hold(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Hold what is to be kept if this life ends by a fault."""
        self._held = _Held(model, optimizer)

    def reached(self, step: int, extra: Any) -> None:
        """Note that model and optimizer have the state of ``step``."""
        if self._held is not None:
            self._held.reached(step, extra)

    def keep(self, members: Sequence[int], rank: int, *, is_whole: bool = True) -> int | None:
        """Keep the tensors of what was held, and hold it no longer.

        Args:
            members: those who lived this life, in the order of their ranks.
            rank: this one's.
            is_whole: False if weights may differ among ranks, whatever step was reached.

        Returns:
            The step whose state is kept; None if there is none.
        """
        held, self._held = self._held, None
        if held is not None and is_whole:
            self._kept = held.kept(members, rank)
        return None if self._kept is None else self._kept.step

    def save(self, members: Sequence[int]) -> None:
        """Write what was kept on all ``members``, who are left; their default group is there.

        If they cannot, as none of them has some part, that is told.

        Raises:
            LostRankError: one more was lost meanwhile.
        """
        kept = self._kept
        assert kept is not None
        try:
            save_collected(
                self._folder / "step-0",
                lambda: kept.left_to(members),
                decode(json.loads(kept.extra)),
                step=kept.step,
            )
        except LostRankError:
            raise  # and try again
        except FullshardError as error:
            self._tell(error)
        self._kept = None

    def is_to_save(self, steps: Sequence[int | None], *, tells: bool) -> bool:
        """Return whether to ``save`` what was kept; forget it if not.

        Args:
            steps: what ``keep`` returned on those who are left, each once.
            tells: whether this rank tells why not.
        """
        if len(steps) == 1 and steps[0] is not None:
            return True
        if tells and len(steps) > 1:
            left = ", ".join(
                "a step that is not over" if one is None else str(one) for one in steps
            )
            log.warning("state is not taken over: the ranks that are left are at steps %s", left)
        self._kept = None
        return False

    def load(
        self,
        checkpointers: Sequence[Checkpointer],
        model: nn.Module,
        optimizer: Optimizer,
        *,
        strict: bool,
    ) -> CheckpointInfo | None:
        """Load what was written, or else the newest checkpoint; return its description."""
        loaded = None
        try:
            here = Checkpointer(self._folder, copies=1)
            loaded = load_newest([here], model, optimizer, strict=strict)
        except (CheckpointError, ConfigError) as error:  # of a stage of a pipeline, say, no rank
            self._tell(error)
        self.forget()
        if loaded is None and checkpointers:
            loaded = load_newest(checkpointers, model, optimizer, strict=strict)
        return loaded

    def forget(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @staticmethod
    def _tell(error: FullshardError) -> None:
        log.warning("the state of the ranks that are left is not taken over: %s", error)
