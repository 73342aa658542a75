"""The checkpoints of a training loop: when to save, which to keep, from which to go on."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fullshard.checkpoint.folders import (
    CheckpointInfo,
    damage,
    numbered,
    put_aside,
    remove,
    remove_unfinished,
)
from fullshard.checkpoint.loading import load_described
from fullshard.checkpoint.pending import PendingSave, settle
from fullshard.checkpoint.saving import How, begin
from fullshard.checkpoint.writing import CopyMemory
from fullshard.comm.council import Council
from fullshard.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves every so many steps, keeps the newest checkpoints, and loads the newest intact one.

    All ranks must make the same calls. No other job may save to the folder.

    Args:
        root: the folder of the checkpoints, shared by all ranks; those of step 100 are in
            ``step-000100``. Other folders there are left alone.
        every: save when this divides the step.
        keep: keep this many checkpoints. Only those count that were read back and found intact,
            which happens once before any other is removed. None: remove none.
        mode, budget_nbytes: as for ``save``; with "async" old checkpoints are read back and removed
            beside the training, too, and the memory of copies is kept for the next save.

    Raises:
        ConfigError: an argument has no meaning.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every: int = 1,
        keep: int | None = None,
        mode: str = "sync",
        budget_nbytes: int | None = None,
    ) -> None:
        for name, value in (("every", every), ("keep", 1 if keep is None else keep)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"Checkpointer({name}={value!r}): expected a positive int")
        self.root = Path(root)
        self._how = How(mode, budget_nbytes, CopyMemory(budget_nbytes, is_kept=True))
        self._how.check()
        self._every = every
        self._keep = keep
        self._is_intact: dict[Path, bool] = {}
        self._is_clean = False

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of ``step``."""
        return self.root / f"step-{step:06d}"

    def is_due(self, step: int) -> bool:
        """Return whether to save after ``step``."""
        return step % self._every == 0

    def save(
        self, model: nn.Module, optimizer: Optimizer | None = None, extra: Any = None, *, step: int
    ) -> PendingSave:
        """Save as the function ``save`` does, and remove checkpoints that need not be kept.

        What jobs that were killed left in the folder is removed before. What cannot be loaded and
        has the name of this checkpoint gets another name; what is intact is a ``ConfigError``.
        """
        settle()
        path = self.path(step)
        council = Council(f"save to {path}")
        if not self._is_clean:
            council.agree(lambda: None, lambda _: remove_unfinished(self.root))
            self._is_clean = True
        if council.agree(lambda: None, lambda _: path.exists()) and not self._verify(council, path):
            aside = council.agree(lambda: None, lambda _: str(put_aside(path)))
            log.warning("what was at %s is now at %s", path, aside)
        self._is_intact.pop(path, None)
        after = partial(self._remove_old, council, path)
        return begin(council, path, model, optimizer, extra, step=step, how=self._how, after=after)

    def wait(self) -> None:
        """Wait for the last save, which goes on beside the training if ``mode`` is "async".

        Raises:
            FullshardError: it failed.
        """
        settle()

    def load(
        self, model: nn.Module, optimizer: Optimizer | None = None, *, strict: bool = True
    ) -> CheckpointInfo | None:
        """Load the newest checkpoint that is intact, and return its description.

        The newest is the one that was saved last. Damaged ones are passed over, with a warning.

        Returns:
            None if there is no checkpoint, damaged ones included.

        Raises:
            CheckpointError: no checkpoint is intact.
            ConfigError, FailedRankError, LostRankError, ProtocolError: as ``load`` does.
        """
        settle()
        failure: CheckpointError | None = None
        for path in reversed(self._paths(Council(f"look at {self.root}"))):
            try:
                return load_described(path, model, optimizer, strict=strict)
            except CheckpointError as error:
                log.warning("%s", error)
                failure = error
        if failure is not None:
            raise failure
        return None

    def _paths(self, council: Council) -> list[Path]:
        """Return the checkpoints that the first rank sees, complete or not, the newest last."""
        names = council.agree(lambda: None, lambda _: [one.name for one in numbered(self.root)])
        return [self.root / name for name in names]

    def _remove_old(self, council: Council, newest: Path) -> None:
        if self._keep is None:
            return
        num_intact = 0
        paths = [newest, *(one for one in reversed(self._paths(council)) if one != newest)]
        for path in paths:
            if num_intact >= self._keep:
                self._remove(council, path)
            elif self._verify(council, path):
                num_intact += 1

    def _remove(self, council: Council, path: Path) -> None:
        council.agree(lambda: None, lambda _: remove(path))
        self._is_intact.pop(path, None)

    def _verify(self, council: Council, path: Path) -> bool:
        """Return whether a checkpoint can be loaded; each rank reads some of its files."""
        if path not in self._is_intact:
            found = council.agree(
                lambda: next(damage(path, first=council.rank, every=council.world), None),
                lambda said: [one for one in said if one],
            )
            if found:
                log.warning("%s is damaged: %s", path, found[0])
            self._is_intact[path] = not found
        return self._is_intact[path]
