"""The command ``fullshard train``: what it refuses, and how it tells of a failed worker."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import typer
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fullshard.cli import main
from fullshard.errors import ConfigError
from fullshard.train import launch
from fullshard.train.config import ModelConfig, TrainConfig
from fullshard.train.rundir import (
    CheckpointInfo,
    RunDir,
    check_continues,
    describe,
    read_info,
    write_info,
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs in an empty folder, with a cache of its own and no launcher around."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refuse_to_start(nproc: int, config: Path) -> None:
    raise AssertionError("a worker was started")


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_start_workers", refuse_to_start)


@pytest.mark.usefixtures("no_workers")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--data nowhere", "nowhere: there is no such file or folder"),
        ("--data short.txt", "too little text: "),
        ("--dtype fp8", "'fp8' is not one of"),
        ("--steps many", "--steps"),
        ("--steps 0", "--steps is 0, it must be at least 1"),
        ("--stop-after 0", "--stop-after is 0, it must be at least 1"),
        ("--lr 0", "--lr is 0.0, it must be greater than 0"),
        ("--unknown", "--unknown"),
        ("--name a/b", "--name a/b: must be a plain name"),
        ("--resume", "runs/default holds no run to resume: start without --resume"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    options: str, message: str, elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "short.txt").write_text("a few words")
    assert main(["train", *options.split()]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("fullshard: error: ")
    assert message in err
    assert not (elsewhere / "runs").exists()


def test_an_unknown_command_is_refused_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capfd.readouterr().err.startswith("fullshard: error: No such command 'trian'")


def test_help_names_every_option_and_starts_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capfd.readouterr().out
    for option in ("--data", "--nproc", "--resume", "--stop-after", "--accumulate", "--reshard"):
        assert option in text


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The configurations with which workers would have been started."""
    configs: list[TrainConfig] = []
    monkeypatch.setattr(
        launch, "_start_workers", lambda nproc, path: configs.append(TrainConfig.load(path))
    )
    return configs


def text_file(folder: Path) -> str:
    path = folder / "text.txt"
    path.write_text("".join(f"line {n}: some words {n * n}\n" for n in range(3000)))
    return str(path)


def a_checkpoint(run: RunDir, config: TrainConfig, key: str, step: int) -> Path:
    path = run.checkpoint(step)
    path.mkdir(parents=True)
    write_info(path, describe(config, step=step, text_key=key, num_workers=config.nproc))
    return path


def key_of_text(started: list[TrainConfig]) -> str:
    from fullshard.train.data import load_text

    return load_text(started[0].data, vocab_size=2048).key


def test_resume_takes_the_options_of_the_run(started: list[TrainConfig], elsewhere: Path) -> None:
    options = ["--data", text_file(elsewhere), "--seq", "16", "--steps", "9", "--stop-after", "4"]
    assert main(["train", *options]) == 0
    a_checkpoint(RunDir(Path("runs/default")), started[0], key_of_text(started), 4)
    assert main(["train", "--resume", "--lr", "0.5"]) == 0
    first, second = started
    assert (first.stop_after, first.resume) == (4, False)
    assert (second.stop_after, second.resume, second.lr) == (None, True, 0.5)
    assert (second.data, second.seq, second.steps) == (first.data, 16, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--steps 4", "is at step 4 already: a greater --steps than 4 goes on"),
        ("--stop-after 3", "is at step 4 already: a greater --stop-after than 3 goes on"),
        ("--data other.txt", "was trained on other text"),
    ],
)
def test_a_run_that_cannot_go_on_says_why(
    change: str,
    message: str,
    started: list[TrainConfig],
    elsewhere: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (elsewhere / "other.txt").write_text("".join(f"{n} other\n" for n in range(3000)))
    assert main(["train", "--data", text_file(elsewhere), "--seq", "16", "--steps", "9"]) == 0
    a_checkpoint(RunDir(Path("runs/default")), started[0], key_of_text(started), 4)
    assert main(["train", "--resume", *change.split()]) == 2
    assert message in capfd.readouterr().err
    assert len(started) == 1


def test_a_new_start_sets_the_earlier_run_aside(
    started: list[TrainConfig], elsewhere: Path
) -> None:
    options = ["train", "--data", text_file(elsewhere), "--seq", "16", "--out", "here"]
    for steps in ("7", "8", "9"):
        assert main([*options, "--steps", steps]) == 0
    saved = [elsewhere / "here" / name for name in ("earlier-1", "earlier-2", ".")]
    assert [TrainConfig.load(path / "config.json").steps for path in saved] == [7, 8, 9]
    assert len(started) == 3


def test_another_model_is_refused(tmp_path: Path) -> None:
    config = TrainConfig()
    path = a_checkpoint(RunDir(tmp_path), config, "key", 4)
    assert read_info(path) == CheckpointInfo(4, "key", 2, describe_model(config), 16)
    with pytest.raises(ConfigError, match="holds another model"):
        check_continues(TrainConfig(model=ModelConfig(dim=64)), path, "key")


def describe_model(config: TrainConfig) -> dict[str, int]:
    return describe(config, step=1, text_key="", num_workers=1).model


def failed(tmp_path: Path, rank: int, exitcode: int, **record: object) -> ProcessFailure:
    path = tmp_path / f"error{rank}.json"
    if record:
        details = {"timestamp": "1", "py_callstack": f"stack of {rank}", **record}
        path.write_text(json.dumps({"message": {"message": "", "extraInfo": details}}))
    return ProcessFailure(rank, 100 + rank, exitcode, str(path))


def explained(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Path, failures: list[ProcessFailure]
) -> int:
    def fail(nproc: int, config: Path) -> None:
        raise launch.ChildFailedError("job", dict(enumerate(failures)))

    monkeypatch.setattr(launch, "_start_workers", fail)
    return main(["train", "--data", text_file(elsewhere), "--seq", "16"])


def test_the_worker_that_failed_first_is_shown(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lost = failed(elsewhere, 0, 1, time_ns=9, is_refusal=False, text="RuntimeError: closed by peer")
    first = failed(elsewhere, 1, 1, time_ns=7, is_refusal=False, text="ValueError: the cause")
    assert explained(monkeypatch, elsewhere, [lost, first]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "fullshard: error: worker 1 of 2 failed: ValueError: the cause",
        "stack of 1",
        "fullshard: no checkpoint was written yet",
    ]


def test_a_killed_worker_explains_the_others(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lost = failed(elsewhere, 0, 1, time_ns=9, is_refusal=False, text="RuntimeError: closed by peer")
    killed = failed(elsewhere, 1, -signal.SIGKILL)
    assert explained(monkeypatch, elsewhere, [lost, killed]) == 1
    assert "worker 1 of 2 failed: Signal 9 (SIGKILL)" in capfd.readouterr().err.splitlines()[0]


def test_a_worker_that_the_launcher_ended_is_not_the_cause(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = failed(elsewhere, 0, -signal.SIGTERM)
    first = failed(elsewhere, 1, 1, time_ns=7, is_refusal=False, text="ValueError: the cause")
    assert explained(monkeypatch, elsewhere, [ended, first]) == 1
    assert "worker 1 of 2 failed: ValueError" in capfd.readouterr().err.splitlines()[0]


def test_a_refusal_of_the_workers_is_one_line(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    refusal = failed(elsewhere, 0, 2, time_ns=7, is_refusal=True, text="the loss is nan")
    assert explained(monkeypatch, elsewhere, [refusal]) == 2
    assert capfd.readouterr().err == "fullshard: error: the loss is nan\n"


def test_typer_still_reports_usage_errors_the_way_we_read_them() -> None:
    assert hasattr(typer.BadParameter, "format_message")
