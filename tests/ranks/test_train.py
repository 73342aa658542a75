"""The command itself, with two workers on a little text: it learns, stops, resumes and fails.

These tests start processes of their own: what they test is the start.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from fullshard.train.config import TrainConfig
from fullshard.train.metrics import read_metrics
from fullshard.train.rundir import RunDir

STEPS = 8
STOP = 5
TIMEOUT_S = 60.0  # a start takes about ten seconds
OPTIONS = f"--steps {STEPS} --batch 2 --seq 32 --accumulate 2 --save-every 3 --eval-every 4"


@dataclass(frozen=True)
class Outcome:
    """What a command said."""

    exitcode: int
    out: str
    err: str


@dataclass(frozen=True)
class Shell:
    """Runs the command on one little text."""

    folder: Path

    def train(
        self, *options: str, program: tuple[str, ...] = ("-m", "fullshard.cli", "train")
    ) -> Outcome:
        """Runs it to its end; after ``TIMEOUT_S`` ends it with its workers and fails the test."""
        fonts = Path.home() / ".cache" / "matplotlib"  # a new index of fonts costs ten seconds
        environment = dict(
            os.environ,
            XDG_CACHE_HOME=str(self.folder / "cache"),
            MPLCONFIGDIR=os.environ.get("MPLCONFIGDIR", str(fonts)),
            OMP_NUM_THREADS="1",
        )
        process = subprocess.Popen(
            [sys.executable, *program, *options],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher takes its workers with it
            out, err = process.communicate(timeout=TIMEOUT_S)
            pytest.fail(f"no end after {TIMEOUT_S} s\n{out}\n{err}")
        return Outcome(process.returncode, out, err)

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """The records of a run."""
        return read_metrics(RunDir(self.folder / run).metrics)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    folder = tmp_path_factory.mktemp("train")
    for number in range(20):
        lines = [f"def square_{n}(x):\n    return x * {n * number}\n" for n in range(100)]
        path = folder / "text" / f"file{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines))
    return Shell(folder)


@pytest.fixture(scope="module")
def whole(shell: Shell) -> Outcome:
    """An uninterrupted run."""
    return shell.train("--data", "text", "--out", "whole", *OPTIONS.split())


@pytest.fixture(scope="module")
def stopped(shell: Shell) -> Outcome:
    """The same run, ended early."""
    options = ["--data", "text", "--out", "stopped", *OPTIONS.split()]
    return shell.train(*options, "--stop-after", str(STOP))


def test_the_loss_falls_and_every_step_is_recorded(shell: Shell, whole: Outcome) -> None:
    assert whole.exitcode == 0, whole.err
    records = shell.metrics("whole")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records[-1]["loss"] < records[0]["loss"] - 1.0
    assert all(record["tokens_per_s"] > 0 and record["seconds"] > 0 for record in records)
    evaluated = {r["step"]: r["eval_bits_per_byte"] for r in records if "eval_bits_per_byte" in r}
    assert list(evaluated) == [4, 8]
    assert evaluated[8] < evaluated[4]


def test_only_the_first_worker_prints_and_the_end_says_where_all_lies(whole: Outcome) -> None:
    lines = whole.out.splitlines()
    assert sum(line.startswith(f"step={STEPS}/{STEPS} loss=") for line in lines) == 1
    assert [line.split()[0] for line in lines[-3:]] == ["metrics", "checkpoints", "next"]
    assert "a sample of what it writes now:" in lines
    assert whole.err == ""


def test_the_run_keeps_its_configuration_and_complete_checkpoints(
    shell: Shell, whole: Outcome
) -> None:
    run = RunDir(shell.folder / "whole")
    assert TrainConfig.load(run.config).steps == STEPS
    names = sorted(path.name for path in run.checkpoints.iterdir())
    assert names == ["step-000003", "step-000006", "step-000008"]
    saved = FileSystemReader(run.checkpoint(STEPS)).read_metadata().state_dict_metadata
    assert saved["model.blocks.0.ffn.down.weight"].size == (192, 512)
    assert "optimizer.state.blocks.0.ffn.down.weight.exp_avg" in saved


def test_a_stopped_run_ends_like_an_uninterrupted_one(
    shell: Shell, whole: Outcome, stopped: Outcome
) -> None:
    assert stopped.exitcode == 0, stopped.err
    assert f"stopped after step {STOP} of {STEPS}" in stopped.out.splitlines()[-1]
    shutil.copytree(shell.folder / "stopped", shell.folder / "resumed")
    outcome = shell.train("--out", "resumed", "--resume")
    assert outcome.exitcode == 0, outcome.err
    pairs = zip(shell.metrics("whole"), shell.metrics("resumed"), strict=True)
    for expected, found in pairs:
        for key in ("step", "loss", "lr", "grad_norm", "eval_bits_per_byte"):
            assert found.get(key) == expected.get(key), (key, found)


def test_torchrun_is_the_same_job(shell: Shell, whole: Outcome) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    options = ["--data", "text", "--out", "torchrun", *OPTIONS.split(), "--stop-after", "2"]
    outcome = shell.train(*options, program=(*torchrun, "-m", "fullshard.train"))
    assert outcome.exitcode == 0, outcome.err
    losses = [record["loss"] for record in shell.metrics("torchrun")]
    assert losses == [record["loss"] for record in shell.metrics("whole")[:2]]


def test_a_failed_worker_ends_the_job_with_its_error_on_top(shell: Shell, stopped: Outcome) -> None:
    run = RunDir(shell.folder / "failing")
    shutil.copytree(shell.folder / "stopped", run.path)
    (run.checkpoints / "unfinished-step-000006").touch()  # a file where the first makes a folder
    outcome = shell.train("--out", "failing", "--resume")
    assert outcome.exitcode == 1
    lines = outcome.err.splitlines()
    assert lines[0].startswith("fullshard: error: worker 0 of 2 failed: FileExistsError")
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1].endswith("--resume  goes on from step-000005")
