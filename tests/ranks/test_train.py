"""The command with two workers on a little text: it learns, stops, resumes and fails.

These tests start their own processes, because they test the start.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fullshard import checkpoint
from fullshard.cli import main
from fullshard.train.config import TrainConfig
from fullshard.train.run.folder import RunDir
from tests.ranks.train_shell import (
    LOOPBACK,
    Outcome,
    Shell,
    children_of,
    is_alive,
    listening,
    torchrun,
)

STEPS = 8
STOP = 5
OPTIONS = f"--steps {STEPS} --batch 2 --seq 32 --accumulate 2 --save-every 3 --eval-every 4"


@pytest.fixture(scope="module")
def whole(shell: Shell) -> Outcome:
    """Run the command without interruption."""
    return shell.train("--data", "text", "--out", "whole", *OPTIONS.split())


@pytest.fixture(scope="module")
def stopped(shell: Shell) -> Outcome:
    """Run the same command with a trace, and stop it early."""
    options = ["--data", "text", "--out", "stopped", "--trace", *OPTIONS.split()]
    return shell.train(*options, "--stop-after", str(STOP))


@pytest.fixture(scope="module")
def resumed(shell: Shell, stopped: Outcome) -> Outcome:
    """Resume a copy of the stopped run, to its end."""
    shutil.copytree(shell.folder / "stopped", shell.folder / "resumed")
    return shell.train("--out", "resumed", "--resume")


def test_the_loss_falls_and_every_step_is_recorded(shell: Shell, whole: Outcome) -> None:
    assert whole.exitcode == 0, whole.err
    records = shell.metrics("whole")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records[-1]["loss"] < records[0]["loss"] - 1.0
    assert all(record["tokens_per_s"] > 0 and record["seconds"] > 0 for record in records)
    assert all(0 < record["waiting"] < 1 for record in records)
    assert {record["shard_nbytes"] for record in records} == {2_557_632 * 4 // 2}
    assert not any("gather_error" in record for record in records)  # without --wire
    peaks = [record["peak_memory_nbytes"] for record in records]
    assert peaks == sorted(peaks) and peaks[0] > 100e6
    evaluated = {r["step"]: r["eval_bits_per_byte"] for r in records if "eval_bits_per_byte" in r}
    assert list(evaluated) == [4, 8]
    assert evaluated[8] < evaluated[4]


def test_only_the_first_worker_prints_and_the_end_says_where_all_lies(whole: Outcome) -> None:
    lines = whole.out.splitlines()
    assert sum(line.startswith(f"step={STEPS}/{STEPS} loss=") for line in lines) == 1
    assert [line.split()[0] for line in lines[-4:]] == ["metrics", "checkpoints", "plan", "next"]
    assert "a sample of what it writes now:" in lines
    slow = ("evaluating: ", "saving: ")  # a line every five seconds on a loaded machine
    assert [line for line in whole.err.splitlines() if not line.startswith(slow)] == []


def test_the_run_was_planned_before_and_is_compared_at_its_end(
    shell: Shell, whole: Outcome
) -> None:
    (told,) = (line for line in whole.out.splitlines() if line.startswith("plan: "))
    assert "of tensors at the peak" in told and "received in a step" in told
    assert "a step" not in told.replace("received in a step", "")  # no hardware, so no times
    plan = json.loads(RunDir(shell.folder / "whole").plan.read_text(encoding="utf-8"))
    assert plan["rest"]["parameters"] == 2_557_632 * 4 // 2
    (compared,) = (line for line in whole.out.splitlines() if line.startswith("plan  "))
    assert "5.12 MB, planned 5.12 MB (+0.0%) of parameters" in compared


def test_the_run_keeps_its_configuration_and_complete_checkpoints(
    shell: Shell, whole: Outcome
) -> None:
    run = RunDir(shell.folder / "whole")
    assert TrainConfig.load(run.config).steps == STEPS
    names = sorted(path.name for path in run.checkpoints.iterdir())
    assert names == ["latest", "step-000003", "step-000006", "step-000008"]
    for step in (3, 6, 8):
        assert checkpoint.verify(run.checkpoints / f"step-{step:06d}").step == step


def assert_same_run(shell: Shell, expected: str, found: str) -> None:
    """Check that both runs have equal metrics in each step."""
    pairs = zip(shell.metrics(expected), shell.metrics(found), strict=True)
    for left, right in pairs:
        for key in ("step", "loss", "lr", "grad_norm", "eval_bits_per_byte"):
            assert right.get(key) == left.get(key), (key, right)


def test_a_stopped_run_ends_like_an_uninterrupted_one(
    shell: Shell, whole: Outcome, stopped: Outcome, resumed: Outcome
) -> None:
    assert stopped.exitcode == 0, stopped.err
    assert f"stopped after step {STOP} of {STEPS}" in stopped.out.splitlines()[-1]
    assert resumed.exitcode == 0, resumed.err
    assert_same_run(shell, "whole", "resumed")
    assert "the trace of an earlier start; it lies in resumed/earlier-1 now" in resumed.out


def report_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the summary of ``fullshard trace FOLDER``; check that the page has equal figures."""
    assert main(["trace", str(folder)]) == 0
    assert "report: " in capsys.readouterr().out
    summary: dict[str, Any] = json.loads((folder / "trace/summary.json").read_text())
    (embedded,) = re.findall(r"<script [^>]*json[^>]*>(.*?)</script>",
                             (folder / "trace/report.html").read_text(), re.DOTALL)  # fmt: skip
    assert json.loads(embedded) == summary
    events = json.loads((folder / "trace/trace.json").read_text())["traceEvents"]
    assert {one["pid"] for one in events} == {0, 1}
    return summary


def test_each_start_of_a_traced_run_has_a_report_beside_its_plan(
    shell: Shell, stopped: Outcome, resumed: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "fullshard trace stopped  makes the report" in stopped.out
    run = RunDir(shell.folder / "resumed")
    plan = json.loads(run.plan.read_text(encoding="utf-8"))
    for folder, steps in ((run.path / "earlier-1", STOP), (run.path, STEPS - STOP)):
        found = report_of(folder, capsys)
        assert (found["world"], found["missing_ranks"]) == (2, [])
        assert found["steps"]["count"] == steps
        assert len(found["units"]) == 7
        assert found["plan"]["difference"] is None  # the run did as planned
        assert found["plan"]["step_s"] is None  # without hardware, the plan has no times
        assert found["memory"]["planned"]["peak"] == plan["peak"]
        shards = found["memory"]["points"][0][1 + found["memory"]["kinds"].index("parameters")]
        assert shards == plan["rest"]["parameters"]


def test_a_run_goes_on_in_another_layout_and_on_another_mesh(
    shell: Shell, whole: Outcome, stopped: Outcome
) -> None:
    shutil.copytree(shell.folder / "stopped", shell.folder / "other")
    outcome = shell.train("--out", "other", "--resume", "--layout", "ragged", "--replicas", "2")
    assert outcome.exitcode == 0, outcome.err
    for expected, found in zip(shell.metrics("whole"), shell.metrics("other"), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_a_killed_worker_ends_the_job_and_the_run_resumes_exactly(
    shell: Shell, whole: Outcome
) -> None:
    options = ["--data", "text", "--out", "killed", *OPTIONS.split()]
    with shell.started(*options) as job:
        shell.wait_for(RunDir(shell.folder / "killed").checkpoints / "step-000003")
        os.kill(children_of(job.pid)[-1], signal.SIGKILL)
        outcome = shell.end_of(job)
    assert outcome.exitcode == 1
    lines = outcome.err.splitlines()
    while lines[0].startswith("rank 1 ended without a word"):  # reported by the other worker
        del lines[0]
    assert "of 2 failed: Signal 9 (SIGKILL)" in lines[0], outcome.err
    assert "--resume  goes on from step-00000" in lines[-1]
    assert len(shell.metrics("killed")) < STEPS
    outcome = shell.train("--out", "killed", "--resume")
    assert outcome.exitcode == 0, outcome.err
    assert_same_run(shell, "whole", "killed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_and_the_run_resumes_exactly(
    shell: Shell, whole: Outcome, number: signal.Signals
) -> None:
    name = number.name.lower()
    with shell.started("--data", "text", "--out", name, *OPTIONS.split()) as job:
        shell.wait_for(RunDir(shell.folder / name).metrics)
        while not shell.metrics(name):
            time.sleep(0.01)
        job.send_signal(number)
        outcome = shell.end_of(job)
    assert outcome.exitcode == 128 + number
    steps = len(shell.metrics(name))
    assert steps < STEPS
    assert outcome.err.endswith(
        f"fullshard train --out {name} --resume  goes on from step-00000{steps}\n"
    )
    outcome = shell.train("--out", name, "--resume")
    assert outcome.exitcode == 0, outcome.err
    assert_same_run(shell, "whole", name)


def test_torchrun_restarts_a_run_where_it_saved(shell: Shell, whole: Outcome) -> None:
    program = list(torchrun(2))
    program.insert(2, "--max-restarts=1")
    options = ["--data", "text", "--out", "restarted", *OPTIONS.split()]
    run = RunDir(shell.folder / "restarted")
    with shell.started(*options, program=tuple(program)) as job:
        shell.wait_for(run.checkpoints / "step-000003")
        os.kill(children_of(job.pid)[-1], signal.SIGKILL)
        outcome = shell.end_of(job)
    assert outcome.exitcode == 0, outcome.err
    assert_same_run(shell, "whole", "restarted")
    assert not (run.path / "earlier-1").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED: reads /proc")
def test_nothing_listens_to_the_network_and_workers_end_when_their_launcher_is_killed(
    shell: Shell,
) -> None:
    options = ["--data", "text", "--out", "orphaned", *OPTIONS.split()]
    with shell.started(*options, "--steps", "10000") as job:
        shell.wait_for(RunDir(shell.folder / "orphaned").metrics)
        workers = children_of(job.pid)
        assert len(workers) == 2
        found = listening([job.pid, *workers])
        assert found  # sockets of gloo
        assert found <= LOOPBACK
        job.kill()
        deadline_s = time.monotonic() + 30
        while any(map(is_alive, workers)) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert not any(map(is_alive, workers))


@pytest.mark.parametrize(("num_workers", "batch"), [(1, "4"), (4, "1")])
def test_torchrun_is_the_same_job_and_other_workers_with_the_same_rows_in_all_read_the_same(
    shell: Shell, whole: Outcome, num_workers: int, batch: str
) -> None:
    out = f"on-{num_workers}"
    options = ["--data", "text", "--out", out, *OPTIONS.split(), "--batch", batch]
    outcome = shell.train(*options, "--stop-after", "4", program=torchrun(num_workers))
    assert outcome.exitcode == 0, outcome.err
    assert sum("step=4/4 loss=" in line for line in outcome.out.splitlines()) == 1
    assert TrainConfig.load(RunDir(shell.folder / out).config).nproc == num_workers
    records = shell.metrics(out)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for expected, found in zip(shell.metrics("whole")[:4], records, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_a_refusal_under_torchrun_is_told_once(shell: Shell) -> None:
    outcome = shell.train("--data", "nowhere", "--out", "refused", program=torchrun(2))
    assert outcome.exitcode != 0
    ours = [line for line in outcome.err.splitlines() if line.startswith("fullshard:")]
    assert len(ours) == 1  # torchrun appends its own report
    assert outcome.err.startswith("fullshard: error: --data ")
    assert outcome.out == ""
    assert not (shell.folder / "refused").exists()


def test_a_failed_worker_ends_the_job_with_its_error_on_top(shell: Shell, stopped: Outcome) -> None:
    run = RunDir(shell.folder / "failing")
    shutil.copytree(shell.folder / "stopped", run.path)
    run.metrics.unlink()
    run.metrics.mkdir()  # instead of the first worker's file
    outcome = shell.train("--out", "failing", "--resume")
    assert outcome.exitcode == 1
    lines = outcome.err.splitlines()
    assert "ended without a word" not in outcome.err
    # Reports of other workers, and that rank 0 cannot write a trace.
    said = "rank 0 failed: IsADirectoryError", "rank 0 exited with IsADir", "the trace in"
    while lines[0].startswith(said):
        del lines[0]
    assert lines[0].startswith("fullshard: error: worker 0 of 2 failed: IsADirectoryError"), (
        outcome.err
    )
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1].endswith("--resume  goes on from step-000005")


def test_a_damaged_checkpoint_is_passed_over(shell: Shell, whole: Outcome) -> None:
    run = RunDir(shell.folder / "damaged")
    shutil.copytree(shell.folder / "whole", run.path)
    file = run.checkpoints / "step-000006" / "rank-00001.safetensors"
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)  # the digests of the tensors are at the end
        opened.write(b"\xff" * 4096)
    shutil.rmtree(run.checkpoints / "step-000008")
    outcome = shell.train("--out", "damaged", "--resume")
    assert outcome.exitcode == 0, outcome.err
    assert_same_run(shell, "whole", "damaged")
    name = file.relative_to(shell.folder)
    assert f"rank 1: {name}: bytes " in outcome.err


def test_steps_that_are_not_finite_are_skipped_and_too_many_end_the_run(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    """Skipped steps are counted; too many in a row end the run with an error and a trace."""
    options = ["--data", "text", "--out", "diverges", *OPTIONS.split(), "--max-skipped", "2"]
    outcome = shell.train(*options, "--lr", "1e30", "--trace")
    assert outcome.exitcode == 2
    assert outcome.err.count("step skipped on all ranks") == 2
    assert "parameter(s) are not finite" in outcome.err
    assert "This is number 3 in a row, max_skipped is 2" in outcome.err
    assert "--lr is 1e+30" in outcome.err
    records = shell.metrics("diverges")
    assert [record.get("skipped") for record in records[-3:]] == [None, 1, 2]
    assert "grad_norm" in records[0] and "grad_norm" not in records[-1]
    traces = sorted((shell.folder / "diverges/trace").glob("rank-*.json"))
    unfinished = [json.loads(path.read_text())["unfinished"] for path in traces]
    assert len(unfinished) == 2 and None not in unfinished
    assert 1 <= report_of(shell.folder / "diverges", capsys)["steps"]["count"] < STEPS
