"""The checkpoints of a run: on the disk, and more often in memory if that is asked for."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from fullshard.checkpoint import Checkpointer, CheckpointInfo, load_newest
from fullshard.errors import ConfigError

from .config import TrainConfig
from .rundir import Origin, RunDir
from .world import World

_COPIES_NBYTES = 1 << 30  # of host memory, for what a step would overwrite before it is written
_COPIES = 2  # machines that have each file in memory, if there are so many


class Saves:
    """Saves beside the training, and loads what was saved last."""

    def __init__(self, config: TrainConfig) -> None:
        run = RunDir(Path(config.out))
        disk = Checkpointer(
            run.checkpoints,
            every=config.save_every,
            mode="async",
            budget_nbytes=_COPIES_NBYTES,
        )
        self._disk = disk
        self._all = [disk]
        self._memory = run.memory if config.memory_every is not None else None
        if self._memory is not None and config.memory_every is not None:
            _check_ours(self._memory)
            self._all.append(
                # It is written from where it is: that takes no longer than to copy it.
                Checkpointer(
                    self._memory,
                    every=config.memory_every,
                    keep=1,
                    copies=_COPIES,
                    mode="async",
                    budget_nbytes=0,
                )
            )

    def is_due(self, step: int) -> bool:
        """Return whether to save after ``step``."""
        return any(one.is_due(step) for one in self._all)

    def save(
        self, model: nn.Module, optimizer: Optimizer, origin: Origin, *, on_disk: bool
    ) -> None:
        """Begin to write a checkpoint, and wait for the one before.

        Args:
            model, optimizer: what to save.
            origin: facts of the checkpoint, its step among them.
            on_disk: not to memory alone.
        """
        due = (one for one in self._all if one.is_due(origin.step))
        where = self._disk if on_disk else next(due, self._disk)
        where.save(model, optimizer, asdict(origin), step=origin.step)

    def wait(self) -> None:
        """Wait until what was begun is written."""
        self._disk.wait()

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints; a decision of all workers."""
        return sorted({step for one in self._all for step in one.steps()})

    def load(self, model: nn.Module, optimizer: Optimizer) -> CheckpointInfo | None:
        """Load the newest intact checkpoint, if there is one."""
        return load_newest(self._all, model, optimizer)

    def forget(self, world: World) -> None:
        """Remove what is in memory, as all that is needed is on the disk, or belongs to no run."""
        if self._memory is not None:
            world.barrier()
            shutil.rmtree(self._memory, ignore_errors=True)
            world.barrier()


def _check_ours(folder: Path) -> None:
    """Raise ``ConfigError`` if another user made ``folder``, whose name can be guessed."""
    if folder.exists() and folder.stat().st_uid != os.geteuid():
        raise ConfigError(f"{folder} belongs to another user: remove it, or train to another --out")
