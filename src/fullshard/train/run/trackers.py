"""``--log``: the figures of ``metrics.jsonl`` in TensorBoard, Weights & Biases or MLflow too.

Each tracker has its own library, which is imported only if ``--log`` names the tracker. The figures
have their names of ``metrics.jsonl``. Only the first worker logs.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from fullshard.errors import ConfigError
from fullshard.train.config import LogTo, TrainConfig

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
    try:
        return importlib.import_module(_LIBRARIES[to])
    except ImportError as error:
        raise ConfigError(
            f"--log {to}: {error}; install it: pip install 'fullshard[{to}]', or leave --log out: "
            "metrics.jsonl has the same figures"
        ) from error


class Tracker(Protocol):
    """A destination of figures."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the figures of one step."""


class _Nowhere:
    def write(self, step: int, values: Mapping[str, float]) -> None:
        pass


class _Logged(ABC):
    """A tracker that is closed at the end of the run, and whose failure does not end the run."""

    _has_failed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the figures of one step; after a failure do nothing."""
        if self._has_failed:
            return
        try:
            self._write(step, values)
        except Exception as error:
            self._has_failed = True
            print(
                f"fullshard: note: the tracker failed at step {step} ({error}); the run continues "
                "without it, and metrics.jsonl has all figures",
                file=sys.stderr,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if not self._has_failed:
            self._close(failed=kind is not None)

    @abstractmethod
    def _write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the figures of one step."""

    @abstractmethod
    def _close(self, *, failed: bool) -> None:
        """End the tracker's run."""


class _TensorBoard(_Logged):
    """Event files in ``tensorboard/`` of the run; steps after ``first`` are dropped."""

    def __init__(self, config: TrainConfig, first: int) -> None:
        folder = Path(config.out) / "tensorboard"
        library = _library(LogTo.TENSORBOARD)
        self._writer = library.SummaryWriter(str(folder), purge_step=first + 1)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def _close(self, *, failed: bool) -> None:
        self._writer.close()


class _WeightsAndBiases(_Logged):
    """A run of wandb, which a resumed run continues; ``WANDB_*`` variables decide the rest."""

    def __init__(self, config: TrainConfig, first: int) -> None:
        noted = Path(config.out) / "wandb-run"
        library = _library(LogTo.WANDB)
        told = noted.read_text().strip() if first and noted.exists() else None
        self._run = library.init(
            name=Path(config.out).name,
            dir=config.out,
            config=dataclasses.asdict(config),
            id=told,
            resume="allow",
        )
        noted.write_text(self._run.id + "\n")

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def _close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _MLflow(_Logged):
    """A run of MLflow, which a resumed run continues; ``MLFLOW_*`` variables say where."""

    def __init__(self, config: TrainConfig, first: int) -> None:
        noted = Path(config.out) / "mlflow-run"
        self._library = _library(LogTo.MLFLOW)
        told = noted.read_text().strip() if first and noted.exists() else None
        run = self._library.start_run(run_id=told, run_name=Path(config.out).name)
        if told is None:
            self._library.log_params(dataclasses.asdict(config))
        noted.write_text(run.info.run_id + "\n")

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        self._library.log_metrics(dict(values), step=step)

    def _close(self, *, failed: bool) -> None:
        self._library.end_run("FAILED" if failed else "FINISHED")


def tracker_of(
    config: TrainConfig, *, first: int, enabled: bool
) -> AbstractContextManager[Tracker]:
    """Return the tracker that ``config.log`` names, for a run that continues after step ``first``.

    If not ``enabled``, as on all workers but the first, nothing is logged.
    """
    if config.log is LogTo.NONE or not enabled:
        return nullcontext(_Nowhere())
    kinds: dict[LogTo, Callable[[TrainConfig, int], _Logged]] = {
        LogTo.TENSORBOARD: _TensorBoard,
        LogTo.WANDB: _WeightsAndBiases,
        LogTo.MLFLOW: _MLflow,
    }
    return kinds[config.log](config, first)
