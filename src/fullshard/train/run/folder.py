"""The folder of a run and its files, and the lock that lets only one job train in it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from fullshard.checkpoint import CheckpointInfo, inspect, latest
from fullshard.errors import CheckpointError, ConfigError
from fullshard.train.config import LOCK, TrainConfig
from fullshard.train.run.patience import HeldOut
from fullshard.train.run.weights import weights_key

_UNKNOWN_THERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def locked(path: Path) -> TextIO:
    """Lock the file ``path``, write the holder of the lock into it, and return it.

    This process holds the lock until it closes the file, or until its end of any kind. The
    operating system keeps the lock, so a file left behind by a killed process locks nothing. In a
    folder that machines share, the lock holds across machines if the file system supports locks.

    Raises:
        ConfigError: another process, named in the message, holds the lock; nothing has changed.
    """
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _UNKNOWN_THERE:
            print(f"fullshard: note: {path} cannot be locked ({error})", file=sys.stderr)
            return file
        with file:
            file.seek(0)
            holder = file.read().strip() or "another process"
        raise ConfigError(
            f"{path.parent}: another run is using this folder ({holder}). Wait until it ends, "
            "or choose another folder with --name or --out"
        ) from error
    file.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
    file.flush()
    return file


@dataclass(frozen=True, slots=True)
class Origin:
    """The facts to check before resuming from a checkpoint, whose ``extra`` has them."""

    step: int
    text_key: str
    num_workers: int
    model: dict[str, Any]
    sequences_per_step: int
    held_out: dict[str, Any] | None = None
    """Fields of ``HeldOut``; None in checkpoints of earlier versions."""
    frozen: str | None = None
    """Key of the weights of ``init`` if they are frozen; None also in earlier versions."""


class RunDir:
    """The paths of a run; finds its complete checkpoints.

    Attributes:
        path: the folder of the run.
        config: the resolved configuration.
        metrics: the metrics, one JSON object per step.
        checkpoints: the folder of checkpoints.
        best: the folder with the best checkpoint of a run that does not keep all.
        best_mark: the file that names the best checkpoint.
        tokenizer: the tokenizer that was trained on the text.
        picture: the loss curve.
        plan: the plan from before the run, as JSON.
        trace: the folder with the workers' traces and the report.
        lock: the file that a training job in this folder locks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.best = path / "best"
        self.best_mark = path / "best.json"
        self.tokenizer = path / "tokenizer.json"
        self.picture = path / "loss.png"
        self.plan = path / "plan.json"
        self.trace = path / "trace"
        self.lock = path / LOCK

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint of ``step``."""
        return self.checkpoints / f"step-{step:06d}"

    def complete(self, step: int) -> Path | None:
        """Return the path of a complete checkpoint of ``step``; None if there is none."""
        path = self.checkpoint(step)
        for each in (path, self.best / path.name):
            with suppress(CheckpointError):
                inspect(each)
                return each
        return None

    @property
    def memory(self) -> Path:
        """Path of the folder of checkpoints in this machine's memory, by the run's path."""
        digest = hashlib.blake2b(str(self.path.absolute()).encode(), digest_size=8).hexdigest()
        return Path("/dev/shm", f"fullshard-{os.geteuid()}-{digest}")

    def newest_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint; without any, the checkpoint in ``best/``."""
        return latest(self.checkpoints) or latest(self.best)

    def set_aside(self, *, resumes: bool) -> Path | None:
        """Move files of an earlier run to ``earlier-<n>`` and return it; None without files.

        A start that ``resumes`` the run moves only the trace of the start before.
        """
        ours = (
            self.config,
            self.metrics,
            self.checkpoints,
            self.best,
            self.best_mark,
            self.tokenizer,
            self.picture,
            self.plan,
            *(self.path / name for name in TRACKED),
        )
        found = [path for path in (self.trace, *(() if resumes else ours)) if path.exists()]
        if not found:
            return None
        names = (self.path / f"earlier-{number}" for number in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        aside.mkdir()
        for path in found:
            path.rename(aside / path.name)
        return aside


TRACKED = ("tensorboard", "wandb", "wandb-run", "mlflow-run")
"""Folders that trackers write, see ``trackers.py``."""


def describe(
    config: TrainConfig, model: dict[str, Any], *, step: int = 0, text_key: str, num_workers: int
) -> Origin:
    """Return the facts of a checkpoint of this run at ``step``."""
    sequences = config.batch * config.accumulate * num_workers
    return Origin(step, text_key, num_workers, model, sequences, frozen=_frozen(config))


def read_origin(checkpoint: Path) -> Origin:
    """Return the facts of a checkpoint; raise ``ConfigError`` if it has none."""
    try:
        return origin_of(inspect(checkpoint))
    except CheckpointError as error:
        raise ConfigError(f"{checkpoint}: not a checkpoint of fullshard train ({error})") from error


def origin_of(checkpoint: CheckpointInfo) -> Origin:
    """Return the facts of a checkpoint; raise ``ConfigError`` if it has none."""
    try:
        return Origin(**checkpoint.extra)
    except TypeError as error:
        what = f"not a checkpoint of fullshard train ({error})"
        raise ConfigError(f"{checkpoint.path}: {what}") from error


def check_continues(config: TrainConfig, ours: Origin, checkpoint: Path, info: Origin) -> None:
    """Check that a run with ``ours`` can continue ``checkpoint``, whose facts are ``info``.

    Raises:
        ConfigError: the checkpoint has another model, another text, or adapters of other frozen
            weights, or the run ended at the checkpoint.
    """
    if info.model != ours.model:
        what = difference(info.model, ours.model)
        raise ConfigError(
            f"{checkpoint} holds another model than --model {config.model} ({what}): give its own, "
            "or start anew without --resume"
        )
    if info.text_key != ours.text_key:
        raise ConfigError(
            f"{checkpoint} was trained on other text: give the same --data, or start anew "
            "without --resume"
        )
    check_frozen(config, checkpoint, info)
    if info.step >= config.last_step:
        limit = f"--steps than {config.steps}"
        if config.last_step < config.steps:
            limit = f"--stop-after than {config.stop_after}"
        elif config.epochs is not None:
            limit = f"--epochs than {config.epochs:g}, or --steps than {config.steps},"
        raise ConfigError(f"{checkpoint} is at step {info.step} already: a greater {limit} goes on")
    over = HeldOut(**(info.held_out or {})).why_over(config)
    if over is not None:
        raise ConfigError(f"{checkpoint} ended the run by {over}: a greater --patience goes on")


def check_frozen(config: TrainConfig, checkpoint: Path, info: Origin) -> None:
    """Raise ``ConfigError`` if a checkpoint's adapters belong to other weights than ``init``."""
    if info.frozen is not None and info.frozen != _frozen(config):
        raise ConfigError(
            f"{checkpoint} has adapters of other weights than --init {config.init} holds now: give "
            "the folder with the weights of the run, or start anew without --resume"
        )


def _frozen(config: TrainConfig) -> str | None:
    return weights_key(Path(config.init)) if config.init and config.lora else None


def difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    """Describe the first field in which two models differ."""
    keys = (key for key in {**there, **here} if there.get(key) != here.get(key))
    key = next(keys, "some field")
    return f"{key} is {there.get(key)} there and {here.get(key)} here"
