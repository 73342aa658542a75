"""The options of ``fullshard train``, and its report of a failed worker.

Its refusals are tested in ``test_train_errors.py``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import typer
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fullshard import checkpoint
from fullshard.cli import main
from fullshard.train.architecture import choose_architecture
from fullshard.train.config import Dtype, TrainConfig
from fullshard.train.data.text import load_text
from fullshard.train.job import launch, worker
from fullshard.train.job.command import _kinds
from fullshard.train.run import Saves, handling
from fullshard.train.run.folder import Origin, RunDir, describe, locked, read_origin


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder, with a cache of its own and without a launcher's variables."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_unknown_command_is_refused_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capfd.readouterr().err.startswith("fullshard: error: No such command 'trian'")


def test_help_names_every_option_and_starts_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capfd.readouterr().out
    for option in ("--data", "--nproc", "--resume", "--stop-after", "--accumulate", "--replicas"):
        assert option in text


@pytest.mark.parametrize("arguments", [[], ["--help"]])
@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_the_program_helps_without_pytorch(
    arguments: list[str],
    columns: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    program = (
        "import sys, fullshard_command as f\n"
        "assert f.main() == 0 and not {'torch', 'fullshard'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", program, *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert main(arguments) == 0
    assert found.split("\n") == [line.rstrip() for line in capfd.readouterr().out.split("\n")]


def test_the_program_runs_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "fullshard_command", "plan", "--no-such-option"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fullshard: error: No such option")


@pytest.mark.parametrize("columns", [60, 80])
def test_help_has_groups_and_whole_options_at_any_width(
    columns: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["train", "--help"]) == 0
    text = capfd.readouterr().out
    lines = text.split("\n")
    assert max(map(len, lines)) <= columns and "…" not in text and "<bool>" not in text
    groups = ["Model", "Text", "Run", "Sharding", "Memory", "Steps", "To look at", "Options"]
    assert [line[:-1] for line in lines if line.endswith(":") and line[0] != " "] == groups
    words = {word for line in lines for word in line.split()}
    fields = {field.name.replace("_", "-") for field in dataclasses.fields(TrainConfig)}
    hidden = {"clip", "weight-decay", "lr-floor", "eval-sequences"}
    assert {f"--{name}" for name in fields - hidden} <= words


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Collect the configurations instead of starting workers."""
    configs: list[TrainConfig] = []

    def start(nproc: int, *arguments: str, keeps_going: bool) -> None:
        configs.append(TrainConfig.load(Path(arguments[-1])))

    monkeypatch.setattr(launch, "start_workers", start)
    return configs


def text_file(folder: Path) -> str:
    path = folder / "text.txt"
    path.write_text("".join(f"line {n}: some words {n * n}\n" for n in range(3000)))
    return str(path)


def a_checkpoint(run: RunDir, config: TrainConfig, key: str, step: int) -> Path:
    path = run.checkpoints / f"step-{step:06d}"
    model = choose_architecture(config).description()
    origin = describe(config, model, step=step, text_key=key, num_workers=config.nproc)
    checkpoint.save(path, nn.Linear(1, 1), extra=dataclasses.asdict(origin), step=step)
    return path


def key_of_text(started: list[TrainConfig]) -> str:
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


def test_a_run_that_goes_on_by_another_schedule_says_so(
    started: list[TrainConfig], elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", text_file(elsewhere), "--seq", "16", "--steps", "9"]
    assert main(["train", *options]) == 0
    told = "schedule: 9 steps; learning rate rises to 0.004 over 1 step, then falls to 0.0002"
    assert told in capfd.readouterr().out
    a_checkpoint(RunDir(Path("runs/default")), started[0], key_of_text(started), 4)
    assert main(["train", "--resume"]) == 0
    assert capfd.readouterr().err == ""
    changes = ["--steps", "12", "--lr-schedule", "wsd", "--betas", "0.9,0.99", "--warmup", "3"]
    assert main(["train", "--resume", *changes]) == 0
    assert capfd.readouterr().err == (
        "fullshard: note: --steps was 9 and is 12 now, --lr-schedule was cosine and is wsd now, "
        "--warmup was 40 and is 3 now, --betas was 0.9,0.95 and is 0.9,0.99 now: the remaining "
        "steps follow the new schedule, those before followed the old one\n"
    )
    assert (started[-1].steps, started[-1].adam_betas) == (12, (0.9, 0.99))
    assert main(["train", "--resume", "--seq", "8", "--seed", "5"]) == 0
    assert "--seq was 16 and is 8 now, --seed was 0 and is 5 now: the remaining steps may" in (
        capfd.readouterr().err
    )


OFF = ("keep", "patience", "memory_every", "min_workers")


def test_a_resumed_run_can_switch_off_what_it_had(
    started: list[TrainConfig], elsewhere: Path
) -> None:
    given = ["train", "--data", text_file(elsewhere), "--seq", "16", "--steps", "9"]
    flags = [f"--{name.replace('_', '-')}" for name in OFF]
    numbers = [word for flag in flags for word in (flag, "2")]
    switches = ["--skip-bad", "--checkpoint-activations", "--trace"]
    assert main([*given, *numbers, *switches]) == 0
    assert [getattr(started[-1], name) for name in OFF] == [2] * 4
    a_checkpoint(RunDir(Path("runs/default")), started[0], key_of_text(started), 4)
    assert main(["train", "--resume"]) == 0
    assert [getattr(started[-1], name) for name in OFF] == [2] * 4
    none = [word for flag in flags for word in (flag, "0")]
    off = ["--no-skip-bad", "--no-checkpoint-activations", "--no-trace"]
    assert main(["train", "--resume", *none, *off]) == 0
    assert [getattr(started[-1], name) for name in OFF] == [None] * 4
    last = started[-1]
    assert not (last.skip_bad or last.checkpoint_activations or last.trace)
    Path("off.toml").write_text("keep = 0\ntrace = false\n")
    assert main(["train", "--resume", "--config", "off.toml"]) == 0
    assert started[-1].keep is None


@pytest.mark.parametrize(
    ("options", "evaluations"), [("--eval-every 2", "4 evaluations"), ("--eval-every 8", "1 eval")]
)
def test_patience_that_cannot_end_the_run_is_told(
    started: list[TrainConfig],
    elsewhere: Path,
    capfd: pytest.CaptureFixture[str],
    options: str,
    evaluations: str,
) -> None:
    given = ["train", "--data", text_file(elsewhere), "--seq", "16", "--steps", "9"]
    assert main([*given, *options.split(), "--patience", "1"]) == 0
    is_told = "--patience 1 cannot end this run" in capfd.readouterr().err
    assert is_told == (evaluations == "1 eval")
    assert main([*given, *options.split(), "--patience", "4"]) == 0
    assert f"--patience 4 cannot end this run, which has {evaluations}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [('sample = "off"', None), ("sample = 7", 7), ('sample = "8"', 8), ("", 120)],
)
def test_a_sample_is_off_or_a_number_also_in_a_file(
    started: list[TrainConfig], elsewhere: Path, line: str, expected: int | None
) -> None:
    (elsewhere / "run.toml").write_text(line)
    options = ["--data", text_file(elsewhere), "--config", "run.toml"]
    assert main(["train", *options]) == main(["train", *options, "--sample", "off"]) == 0
    assert [config.sample for config in started] == [expected, None]
    saved = TrainConfig.load(Path("runs/default/config.json"))
    assert saved == started[1]


def num_rows(config: TrainConfig) -> int:
    return len(load_text(config.data, vocab_size=2048).train.rows(config.seq))


@pytest.mark.parametrize("epochs", ["1", "2", "0.5"])
def test_epochs_are_steps_by_the_text(
    started: list[TrainConfig], elsewhere: Path, capfd: pytest.CaptureFixture[str], epochs: str
) -> None:
    options = ["--data", text_file(elsewhere), "--seq", "16", "--batch", "3", "--nproc", "2"]
    assert main(["train", *options, "--epochs", epochs]) == 0
    rows = num_rows(started[0])
    steps = started[0].steps
    assert (steps - 1) * 6 < float(epochs) * rows <= steps * 6
    assert started[0].epochs == float(epochs) and started[0].last_step == steps
    told = f"schedule: {steps:,} steps (--epochs {epochs} of {rows:,} sequences of 16 tokens, 6 a "
    assert told + "step); learning rate rises to 0.004 over " in capfd.readouterr().out


def test_a_run_goes_on_with_the_steps_of_its_epochs(
    started: list[TrainConfig], elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", text_file(elsewhere), "--seq", "16", "--batch", "4", "--nproc", "1"]
    assert main(["train", *options, "--epochs", "1"]) == 0
    first = started[0].steps
    a_checkpoint(RunDir(Path("runs/default")), started[0], key_of_text(started), 4)
    capfd.readouterr()
    for changes in ([], ["--nproc", "2"], ["--epochs", "1", "--batch", "2"]):
        assert main(["train", "--resume", *changes]) == 0
        assert (started[-1].steps, started[-1].epochs) == (first, 1.0)
        out, err = capfd.readouterr()
        assert f"schedule: {first} steps (--epochs 1 at the first start)" in out
        assert "follow the new schedule" not in err
    assert main(["train", "--resume", "--nproc", "1", "--batch", "4", "--epochs", "2"]) == 0
    assert started[-1].steps in (2 * first, 2 * first - 1)
    said = f"--epochs was 1 and is 2 now, --steps was {first} and is {started[-1].steps} now"
    assert said in capfd.readouterr().err
    assert main(["train", "--resume", "--steps", "99"]) == 0
    assert (started[-1].steps, started[-1].epochs) == (99, None)
    assert "--epochs was 2 and is not given now" in capfd.readouterr().err
    assert main(["train", "--resume", "--epochs", "1"]) == 0
    assert (started[-1].steps, started[-1].epochs) == (first, 1.0)
    said = f"--epochs was not given and is 1 now, --steps was 99 and is {first} now"
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "by_hand", "expected"),
    [
        ("epochs = 2", [], 2.0),
        ("steps = 5", ["--epochs", "3"], 3.0),
        ("epochs = 0.5", ["--steps", "5"], None),
    ],
)
def test_epochs_or_steps_by_hand_win_over_the_other_in_a_file(
    started: list[TrainConfig],
    elsewhere: Path,
    line: str,
    by_hand: list[str],
    expected: float | None,
) -> None:
    (elsewhere / "run.toml").write_text(line)
    assert main(["train", "--data", text_file(elsewhere), "--config", "run.toml", *by_hand]) == 0
    assert started[0].epochs == expected
    assert (started[0].steps == 5) == (expected is None)


def test_a_new_start_sets_the_earlier_run_aside(
    started: list[TrainConfig], elsewhere: Path
) -> None:
    options = ["train", "--data", text_file(elsewhere), "--seq", "16", "--out", "here"]
    for steps in ("7", "8", "9"):
        assert main([*options, "--steps", steps]) == 0
    saved = [elsewhere / "here" / name for name in ("earlier-1", "earlier-2", ".")]
    assert [TrainConfig.load(path / "config.json").steps for path in saved] == [7, 8, 9]
    assert len(started) == 3


@pytest.mark.parametrize("resume", [False, True])
def test_one_job_at_a_time_trains_in_a_folder(
    started: list[TrainConfig], elsewhere: Path, capfd: pytest.CaptureFixture[str], resume: bool
) -> None:
    options = ["train", "--data", text_file(elsewhere), "--seq", "16", "--out", "here"]
    assert main([*options, "--steps", "7"]) == 0
    run = RunDir(elsewhere / "here")
    a_checkpoint(run, started[0], key_of_text(started), 4)
    again = [*options, "--steps", "9", *(["--resume"] if resume else [])]
    with locked(run.lock):
        before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
        capfd.readouterr()
        assert main(again) == 2
        assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    error = capfd.readouterr().err
    assert error.startswith(f"fullshard: error: {Path('here')}: another run is using this folder")
    assert f"process {os.getpid()} on {socket.gethostname()} since " in error
    assert run.lock.read_text().startswith("process ")  # the file is left, but not locked
    assert main(again) == 0
    assert len(started) == 2


def test_a_checkpoint_says_what_it_holds(tmp_path: Path) -> None:
    path = a_checkpoint(RunDir(tmp_path), TrainConfig(), "key", 4)
    model = {"dim": 192, "num_layers": 4, "num_heads": 4, "ffn_dim": 512, "vocab_size": 2048}
    assert read_origin(path) == Origin(4, "key", 2, model, 16)


def test_a_path_is_kept_from_anywhere(started: list[TrainConfig], elsewhere: Path) -> None:
    text_file(elsewhere)
    assert main(["train", "--data", "text.txt"]) == 0
    assert started[0].data == str(elsewhere / "text.txt")


def test_the_learning_rate_follows_the_model_unless_given(
    started: list[TrainConfig], elsewhere: Path
) -> None:
    options = ["train", "--data", text_file(elsewhere), "--model", "10m"]
    assert main(options) == main([*options, "--lr", "0.5"]) == 0
    assert [config.lr for config in started] == [2e-3, 0.5]


@pytest.fixture
def file_of_options(elsewhere: Path) -> Path:
    path = elsewhere / "run.toml"
    path.write_text(
        f'data = "{text_file(elsewhere)}"\nsteps = 7\nseq = 16\nlr = 1\nname = "mine"\n'
        'stop-after = 5\ncheckpoint_activations = true\nreshard = false\ndtype = "bf16"\n'
    )
    return path


def test_a_file_gives_options(
    started: list[TrainConfig], elsewhere: Path, file_of_options: Path
) -> None:
    assert main(["train", "--config", str(file_of_options)]) == 0
    expected = TrainConfig(
        out="runs/mine",
        data=str(elsewhere / "text.txt"),
        nproc=launch.default_nproc(),
        steps=7,
        stop_after=5,
        seq=16,
        lr=1.0,
        dtype=Dtype.BF16,
        reshard=False,
        checkpoint_activations=True,
    )
    assert started == [expected]
    assert TrainConfig.load(elsewhere / "runs" / "mine" / "config.json") == expected


def test_options_given_by_hand_win_over_the_file(
    started: list[TrainConfig], file_of_options: Path
) -> None:
    by_hand = "--steps 9 --out there --reshard --dtype fp32 --stop-after 2".split()
    assert main(["train", "--config", str(file_of_options), *by_hand]) == 0
    (config,) = started
    assert (config.steps, config.stop_after, config.out) == (9, 2, "there")
    assert (config.reshard, config.dtype, config.seq) == (True, Dtype.FP32, 16)


def test_a_file_wins_over_the_run_that_is_resumed(
    started: list[TrainConfig], elsewhere: Path, file_of_options: Path
) -> None:
    options = ["--data", text_file(elsewhere), "--seq", "16", "--steps", "9", "--name", "mine"]
    assert main(["train", *options]) == 0
    a_checkpoint(RunDir(Path("runs/mine")), started[0], key_of_text(started), 4)
    assert main(["train", "--resume", "--config", str(file_of_options)]) == 0
    assert (started[1].steps, started[1].resume, started[1].lr) == (7, True, 1.0)


def test_every_option_can_stand_in_a_file() -> None:
    known = set(_kinds())
    of_the_run = {field.name for field in dataclasses.fields(TrainConfig)}
    assert known - {"name", "out"} <= of_the_run
    assert {"model", "data", "nproc", "resume", "checkpoint_activations"} <= known


def test_ctrl_c_while_the_text_is_read_is_no_traceback(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(config: TrainConfig, *, num_workers: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "prepare", interrupted)
    assert main(["train", "--data", text_file(elsewhere)]) == 130
    assert capfd.readouterr() == ("", "")


def failed(tmp_path: Path, rank: int, exitcode: int, **record: object) -> ProcessFailure:
    path = tmp_path / f"error{rank}.json"
    if record:
        details = {"timestamp": "1", "py_callstack": f"stack of {rank}", **record}
        path.write_text(json.dumps({"message": {"message": "", "extraInfo": details}}))
    return ProcessFailure(rank, 100 + rank, exitcode, str(path))


def explained(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Path, failures: list[ProcessFailure]
) -> int:
    def fail(nproc: int, *arguments: str, keeps_going: bool) -> None:
        raise launch.ChildFailedError("job", dict(enumerate(failures)))

    monkeypatch.setattr(launch, "start_workers", fail)
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


def test_a_clock_that_is_set_back_does_not_change_who_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.time, "time_ns", iter((2_000, 1_000)).__next__)
    times = []
    for name in ("first", "second"):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / name))
        worker._record(ValueError(name), is_refusal=False)
        times.append(json.loads((tmp_path / name).read_text())["message"]["extraInfo"]["time_ns"])
    assert times == sorted(times)


def test_signals_that_are_ignored_stay_ignored() -> None:
    """``nohup`` ignores SIGHUP for its command, which then goes on when the terminal closes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    got: list[int] = []
    try:
        with handling((signal.SIGHUP, signal.SIGUSR1), lambda number, _: got.append(number)):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
        assert got == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


class Store:
    """A store of torchrun in which workers of an earlier start have noted that they prepared."""

    def check(self, keys: list[str]) -> bool:
        return True


@pytest.mark.parametrize("where", ["nowhere", "memory", "disk"])
def test_workers_that_torchrun_restarts_resume_from_the_disk(
    where: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(out=str(elsewhere / "run"), memory_every=1)
    if where == "disk":
        a_checkpoint(RunDir(elsewhere / "run"), config, "key", 4)
    monkeypatch.setattr(Saves, "steps", lambda self: [7] if where == "memory" else [])
    world = mock.Mock(is_first=True, kept=Store(), rows=lambda value: torch.tensor([[value]]))
    assert worker._going_on(config, world).resume == (where == "disk")


@pytest.mark.parametrize("memory_every", [None, 1])
def test_a_run_that_starts_removes_checkpoints_in_memory_of_an_earlier_one(
    memory_every: int | None, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a later start with --memory-every would resume the earlier run."""
    monkeypatch.setattr(RunDir, "memory", elsewhere / "memory")
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    (elsewhere / "memory" / "step-000050").mkdir(parents=True)
    Saves(TrainConfig(out=str(elsewhere / "run"), memory_every=memory_every)).forget()
    assert not (elsewhere / "memory").exists()


WAITS = """
import os, time
if os.environ["RANK"] == "0":
    raise SystemExit(3)
time.sleep(60)
"""


def test_workers_that_have_not_met_end_with_a_lost_one() -> None:
    """The other workers would wait for the lost worker until a time-out of PyTorch."""
    with pytest.raises(ChildFailedError) as caught:
        launch.start_workers(2, "-c", WAITS, keeps_going=True)
    codes = {rank: one.exitcode for rank, one in caught.value.failures.items()}
    assert codes == {0: 3}


IGNORES = """
import os, pathlib, signal, sys, time
ready = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    while not ready.exists():
        time.sleep(0.01)
    raise SystemExit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready.touch()
time.sleep(60)
"""


@pytest.mark.parametrize("keeps_going", [False, True])
def test_a_worker_that_the_launcher_kills_is_not_the_cause(
    keeps_going: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_GRACE_S", 0.2)
    with pytest.raises(ChildFailedError) as caught:
        launch.start_workers(2, "-c", IGNORES, str(tmp_path / "ready"), keeps_going=keeps_going)
    assert list(caught.value.failures) == [0]


def test_a_killed_worker_explains_the_others(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lost = failed(elsewhere, 0, 1, time_ns=9, is_refusal=False, text="RuntimeError: closed by peer")
    killed = failed(elsewhere, 1, -signal.SIGKILL)
    assert explained(monkeypatch, elsewhere, [lost, killed]) == 1
    assert "worker 1 of 2 failed: Signal 9 (SIGKILL)" in capfd.readouterr().err.splitlines()[0]


def test_a_refusal_of_the_workers_is_one_line(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    refusal = failed(elsewhere, 0, 2, time_ns=7, is_refusal=True, text="the loss is nan")
    assert explained(monkeypatch, elsewhere, [refusal]) == 2
    assert capfd.readouterr().err == "fullshard: error: the loss is nan\n"


def test_every_option_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text()
    table = page.partition("## Options")[2].partition("## What it writes")[0]
    listed = set(re.findall(r"`--([a-z-]+)`", table))
    options = {name.replace("_", "-") for name in _kinds()}
    options = options - {"reshard", "pack"} | {"no-reshard", "no-pack"}  # their defaults are on
    assert listed - {"help", "config FILE.toml"} == options


def test_typer_still_reports_usage_errors_the_way_we_read_them() -> None:
    assert hasattr(typer.BadParameter, "format_message")


def test_workers_that_ignore_a_signal_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a job that goes on without workers that were lost."""
    monkeypatch.setattr(launch, "_GRACE_S", 0.2)
    stuck = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE)
    assert stuck.stdout is not None and stuck.stdout.readline() == b"ready\n"
    stuck.send_signal(signal.SIGTERM)
    launch._wait([stuck], [signal.SIGTERM], keeps_going=True)
    assert stuck.returncode == -signal.SIGKILL
    stuck.stdout.close()


STUCK = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""
