"""``--log``: the figures of ``metrics.jsonl`` in TensorBoard, Weights & Biases or MLflow too.

Each tracker has its own library, which is imported only if ``--log`` names the tracker. The figures
have their names of ``metrics.jsonl``. Only the first worker logs.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from fullshard.train.config import LogTo, TrainConfig
from fullshard.train.extras import imported

_LIBRARIES = {
    LogTo.TENSORBOARD: "torch.utils.tensorboard",
    LogTo.WANDB: "wandb",
    LogTo.MLFLOW: "mlflow",
}


def check_tracker(config: TrainConfig) -> None:
    """Import the library of ``config.log``, before any worker starts.

    Raises:
        ConfigError: the library is not installed.
    """
    if config.log is not LogTo.NONE:
        _library(config.log)


def _library(to: LogTo) -> Any:
    module = _LIBRARIES[to]
    return imported(module, f"--log {to}", extra=str(to), package=module.rpartition(".")[2])


class Tracker:
    """A destination of figures, closed at the end of the run; its failure does not end the run.

    Args:
        log: logs the figures of one step.
        close: ends the tracker's run; called with True if the training failed.
    """

    def __init__(
        self, log: Callable[[int, dict[str, float]], object], close: Callable[[bool], object]
    ) -> None:
        self._log, self._close = log, close
        self._has_failed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the figures of one step; after a failure do nothing."""
        if self._has_failed:
            return
        try:
            self._log(step, dict(values))
        except Exception as error:
            self._give_up(f"at step {step}", error)

    def _give_up(self, where: str, error: Exception) -> None:
        self._has_failed = True
        print(
            f"fullshard: note: the tracker failed {where} ({error}); the run continues "
            "without it, and metrics.jsonl has all figures",
            file=sys.stderr,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._has_failed:
            return
        try:
            self._close(kind is not None)
        except Exception as error:
            self._give_up("at the end", error)


def _tensorboard(config: TrainConfig, first: int) -> Tracker:
    """Return a tracker with event files in ``tensorboard/``, without steps after ``first``."""
    folder = str(Path(config.out) / "tensorboard")
    writer = _library(LogTo.TENSORBOARD).SummaryWriter(folder, purge_step=first + 1)

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, lambda _: writer.close())


def _wandb(config: TrainConfig, first: int) -> Tracker:
    """Return a tracker of wandb; a resumed run continues its run. ``WANDB_*`` set other options."""
    noted = Path(config.out) / "wandb-run"
    run = _library(LogTo.WANDB).init(
        name=Path(config.out).name,
        dir=config.out,
        config=dataclasses.asdict(config),
        id=_continued(noted, first),
        resume="allow",
    )
    noted.write_text(run.id + "\n")
    return Tracker(
        lambda step, values: run.log(values, step=step),
        lambda failed: run.finish(exit_code=int(failed)),
    )


def _mlflow(config: TrainConfig, first: int) -> Tracker:
    """Return a tracker of MLflow; a resumed run continues its run. ``MLFLOW_*`` set the server."""
    noted = Path(config.out) / "mlflow-run"
    library = _library(LogTo.MLFLOW)
    continued = _continued(noted, first)
    run = library.start_run(run_id=continued, run_name=Path(config.out).name)
    if continued is None:
        library.log_params(dataclasses.asdict(config))
    noted.write_text(run.info.run_id + "\n")
    return Tracker(
        lambda step, values: library.log_metrics(values, step=step),
        lambda failed: library.end_run("FAILED" if failed else "FINISHED"),
    )


def _continued(noted: Path, first: int) -> str | None:
    """Return the id of the tracker's run in the file ``noted``; None for a new run."""
    return noted.read_text().strip() if first and noted.exists() else None


_TRACKERS = {LogTo.TENSORBOARD: _tensorboard, LogTo.WANDB: _wandb, LogTo.MLFLOW: _mlflow}


def tracker_of(config: TrainConfig, *, first: int, enabled: bool) -> Tracker:
    """Return the tracker that ``config.log`` names, for a run that continues after step ``first``.

    If not ``enabled``, as on all workers but the first, nothing is logged.
    """
    if config.log is LogTo.NONE or not enabled:
        return Tracker(lambda *_: None, lambda _: None)
    return _TRACKERS[config.log](config, first)
