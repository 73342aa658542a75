"""Trackers: each gets the figures of a step through its own library, or reports what is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from fullshard.errors import ConfigError
from fullshard.train.config import LogTo, TrainConfig
from fullshard.train.run.folder import RunDir
from fullshard.train.run.trackers import check_tracker, tracker_of

FIGURES = [(1, {"loss": 2.5, "lr": 0.1}), (2, {"loss": 2.0, "lr": 0.2})]


class Spy(ModuleType):
    """A fake of ``wandb`` or ``mlflow`` that records calls."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.said: list[Any] = []
        self.fails = False

    def init(self, **options: Any) -> Any:
        self.said.append(("init", options["name"], options["id"], options["config"]["seq"]))
        return SimpleNamespace(id="w1", log=self.note, finish=lambda exit_code: self.end(exit_code))

    def note(self, values: dict[str, float], step: int) -> None:
        if self.fails:
            raise OSError("no route to host")
        self.said.append((step, values))

    def start_run(self, run_id: str | None, run_name: str) -> Any:
        self.said.append(("start", run_name, run_id))
        return SimpleNamespace(info=SimpleNamespace(run_id="m1"))

    def log_params(self, params: dict[str, Any]) -> None:
        self.said.append(("params", params["seq"]))

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.note(values, step)

    def end(self, how: object) -> None:
        self.said.append(("end", how))

    end_run = end


def config_of(folder: Path, log: LogTo) -> TrainConfig:
    folder.mkdir(exist_ok=True)
    return TrainConfig(out=str(folder), log=log, seq=64)


def follow(config: TrainConfig, first: int = 0, enabled: bool = True) -> None:
    with tracker_of(config, first=first, enabled=enabled) as tracker:
        for step, values in FIGURES:
            tracker.write(step, values)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Spy:
    found = Spy(request.param)
    monkeypatch.setitem(sys.modules, request.param, found)
    return found


@pytest.mark.parametrize("spy", ["wandb"], indirect=True)
def test_wandb_gets_the_figures_and_is_resumed(spy: Spy, tmp_path: Path) -> None:
    config = config_of(tmp_path / "mine", LogTo.WANDB)
    follow(config)
    assert spy.said == [("init", "mine", None, 64), *FIGURES, ("end", 0)]
    spy.said.clear()
    follow(config, first=2)
    assert spy.said[0] == ("init", "mine", "w1", 64)


@pytest.mark.parametrize("spy", ["mlflow"], indirect=True)
def test_mlflow_gets_the_figures_and_is_resumed(spy: Spy, tmp_path: Path) -> None:
    config = config_of(tmp_path / "mine", LogTo.MLFLOW)
    follow(config)
    assert spy.said == [("start", "mine", None), ("params", 64), *FIGURES, ("end", "FINISHED")]
    spy.said.clear()
    follow(config, first=2)
    assert spy.said[:2] == [("start", "mine", "m1"), FIGURES[0]]
    spy.said.clear()
    with pytest.raises(ZeroDivisionError), tracker_of(config, first=2, enabled=True):
        raise ZeroDivisionError
    assert spy.said[-1] == ("end", "FAILED")


@pytest.mark.parametrize("spy", ["wandb"], indirect=True)
def test_a_tracker_that_fails_does_not_end_the_run(
    spy: Spy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spy.fails = True
    follow(config_of(tmp_path, LogTo.WANDB))
    told = capsys.readouterr().err
    assert told.count("the tracker failed at step 1 (no route to host)") == 1
    assert [one for one in spy.said if one[0] != "init"] == []


@pytest.mark.parametrize("spy", ["mlflow"], indirect=True)
def test_a_tracker_that_cannot_be_closed_does_not_end_the_run(
    spy: Spy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(spy, "end_run", mock.Mock(side_effect=OSError("no route to host")))
    follow(config_of(tmp_path / "mine", LogTo.MLFLOW))
    assert "the tracker failed at the end (no route to host)" in capsys.readouterr().err


@pytest.mark.parametrize("spy", ["wandb"], indirect=True)
def test_other_workers_log_nothing(spy: Spy, tmp_path: Path) -> None:
    follow(config_of(tmp_path, LogTo.WANDB), enabled=False)
    follow(config_of(tmp_path, LogTo.NONE))
    assert spy.said == []


@pytest.mark.parametrize("log", [LogTo.TENSORBOARD, LogTo.WANDB, LogTo.MLFLOW])
def test_a_missing_library_is_named_before_the_start(
    log: LogTo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch.utils.tensorboard", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"--log {log} needs {log}: pip install -e '.\[{log}\]'"):
        check_tracker(config_of(tmp_path, log))
    check_tracker(config_of(tmp_path, LogTo.NONE))


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    follow(config_of(tmp_path, LogTo.TENSORBOARD))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "lr"]
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [(1, 2.5), (2, 2.0)]


def test_the_choice_is_part_of_the_configuration(tmp_path: Path) -> None:
    config = config_of(tmp_path, LogTo.MLFLOW)
    assert TrainConfig.from_json(config.to_json()) == config


def test_a_new_start_moves_what_a_tracker_wrote(tmp_path: Path) -> None:
    (tmp_path / "wandb-run").write_text("w1\n")
    aside = RunDir(tmp_path).set_aside(resumes=False)
    assert aside is not None and (aside / "wandb-run").exists()
