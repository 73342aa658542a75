"""The checkpoints of a run: on the disk, and optionally more often in memory."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fullshard import Life
from fullshard.checkpoint import Checkpointer, CheckpointInfo
from fullshard.errors import ConfigError
from fullshard.train.config import TrainConfig
from fullshard.train.run.best import BestMark
from fullshard.train.run.folder import RunDir

_COPIES_NBYTES = 1 << 30  # host memory for copies of tensors, before steps overwrite them
_COPIES = 2  # machines that hold each file in memory, or all if there are fewer


class Saves:
    """Saves in the background of the training, and loads the newest state.

    Args:
        config: the configuration of the run.
        marks_best: whether this worker marks the best checkpoint, as the first one does.
    """

    def __init__(self, config: TrainConfig, *, marks_best: bool = False) -> None:
        run = RunDir(Path(config.out))
        self._best = BestMark(run, is_apart=config.keep is not None) if marks_best else None
        # With adapters, --init has the frozen weights, to be read again.
        in_background = partial(Checkpointer, mode="async", frozen=config.lora is None)
        self._disk = in_background(
            run.checkpoints,
            every=config.save_every,
            keep=config.keep,
            budget_nbytes=_COPIES_NBYTES,
        )
        self._all = [self._disk]
        # No save goes here; the best checkpoint is loaded if all others are lost.
        self._kept_best = Checkpointer(run.best)
        self._memory = run.memory
        if config.memory_every is not None:
            _check_ours(self._memory)
            self._all.append(
                # Tensors are written without a copy first, because a copy would take as long.
                in_background(
                    self._memory,
                    every=config.memory_every,
                    keep=1,
                    copies=_COPIES,
                    budget_nbytes=0,
                )
            )

    def is_due(self, step: int) -> bool:
        """Return whether to save after ``step``."""
        return any(one.is_due(step) for one in self._all)

    def save(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        extra: dict[str, Any],
        *,
        step: int,
        on_disk: bool,
        bits_per_byte: float | None = None,
    ) -> None:
        """Start to write a checkpoint, after the end of the previous save.

        Args:
            model, optimizer: the state to save.
            extra, step: facts and step of the checkpoint.
            on_disk: True if the checkpoint must not be in memory alone.
            bits_per_byte: held-out loss of this step; None: not evaluated.
        """
        self.wait()  # the best checkpoint is marked before this save removes an older one
        due = (one for one in self._all if one.is_due(step))
        where = self._disk if on_disk else next(due, self._disk)
        where.save(model, optimizer, extra, step=step)
        if self._best is not None and where is self._disk:
            self._best.begin(step, bits_per_byte)

    def wait(self) -> None:
        """Wait until the last save on the disk is written, and mark the best checkpoint."""
        self._disk.wait()
        if self._best is not None:
            self._best.end()

    def resume_best(self, step: int) -> None:
        """Find the best checkpoint of a run that resumes from ``step``."""
        if self._best is not None:
            self._best.resume(step)

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints; a decision of all workers."""
        return sorted({step for one in (*self._all, self._kept_best) for step in one.steps()})

    def load(
        self, model: nn.Module, optimizer: Optimizer, life: Life, *, resumes: bool
    ) -> CheckpointInfo | None:
        """Load the newest state: of an earlier life or, if ``resumes``, of a checkpoint.

        The next life gets the state of ``model`` and ``optimizer``.
        """
        return life.load([*self._all, self._kept_best] if resumes else [], model, optimizer)

    def forget(self) -> None:
        """Remove the checkpoints in memory: they are on the disk too, or no run needs them."""
        dist.barrier()
        shutil.rmtree(self._memory, ignore_errors=True)
        dist.barrier()


def _check_ours(folder: Path) -> None:
    """Raise ``ConfigError`` if another user made ``folder``, whose name can be guessed."""
    if folder.exists() and folder.stat().st_uid != os.geteuid():
        raise ConfigError(f"{folder} belongs to another user: remove it, or train to another --out")
