"""The command with --min-workers: the job continues after a worker is killed.

These tests start their own processes, because they kill one of them.
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from fullshard.train.run.folder import RunDir
from tests.ranks.train_shell import LOOPBACK, Outcome, Shell, children_of, listening

STEPS = 8
OPTIONS = f"--data text --steps {STEPS} --batch 2 --seq 32 --save-every 2 --eval-every 8".split()


@pytest.fixture(scope="module")
def bereft(shell: Shell) -> Outcome:
    """Train with three workers, and kill the first after a save in memory."""
    options = ("--out", "bereft", "--nproc", "3", "--min-workers", "2", *OPTIONS)
    with shell.started(*options, "--save-every", "8", "--memory-every", "2") as job:
        shell.wait_for(RunDir(shell.folder / "bereft").memory / "step-000002")
        assert listening([job.pid, *children_of(job.pid)]) <= LOOPBACK
        os.kill(_first_of(job.pid), signal.SIGKILL)
        return shell.end_of(job)


def _first_of(launcher: int) -> int:
    """Return the process of rank 0."""
    for pid in children_of(launcher):
        with open(f"/proc/{pid}/environ", "rb") as file:
            if b"\0RANK=0\0" in b"\0" + file.read():
                return pid
    raise AssertionError(f"{launcher} has no worker of rank 0")


def begun_again(outcome: Outcome) -> int:
    """Return the step from which the job resumed."""
    found = re.search(r"resumed on 2 ranks after losing .*; step (\d+) finished", outcome.err)
    assert found, outcome.err
    return int(found[1]) - 1


def test_a_job_goes_on_when_its_first_worker_is_killed(shell: Shell, bereft: Outcome) -> None:
    assert bereft.exitcode == 0, bereft.err
    assert "worker 0 was ended by SIGKILL" in bereft.err
    assert begun_again(bereft) in (2, 4, 6), bereft.err
    assert not RunDir(shell.folder / "bereft").memory.exists()  # deleted after a successful end
    assert [record["step"] for record in shell.metrics("bereft")] == list(range(1, STEPS + 1))


def test_replicas_that_are_left_lose_no_step(shell: Shell) -> None:
    """A surviving replica has all weights: the job continues without a checkpoint."""
    options = "--out halved --nproc 2 --replicas 2 --min-workers 1 --save-every 99".split()
    with shell.started(*OPTIONS, *options, "--steps", "40") as job:
        metrics = RunDir(shell.folder / "halved").metrics
        shell.wait_for(metrics)
        while not metrics.read_bytes():
            time.sleep(0.01)
        os.kill(_first_of(job.pid), signal.SIGKILL)
        outcome = shell.end_of(job)
    assert outcome.exitcode == 0, outcome.err
    assert "0 steps were repeated" in outcome.err
    steps = [record["step"] for record in shell.metrics("halved")]
    assert steps == sorted({*steps})
    assert len({*range(1, 41)} - {*steps}) <= 1  # figures that were lost with the worker


def test_it_is_the_run_that_changes_its_workers_at_the_same_checkpoint(
    shell: Shell, bereft: Outcome
) -> None:
    step = begun_again(bereft)
    options = ("--out", "changed", "--nproc", "3", *OPTIONS, "--stop-after", str(step))
    assert shell.train(*options).exitcode == 0
    assert shell.train("--out", "changed", "--resume", "--nproc", "2").exitcode == 0
    for left, right in zip(shell.metrics("changed"), shell.metrics("bereft"), strict=True):
        for key in ("step", "loss", "lr", "grad_norm", "eval_bits_per_byte"):
            assert right.get(key) == left.get(key), (key, right)


def test_too_few_workers_end_the_job(shell: Shell) -> None:
    options = ("--out", "few", "--nproc", "2", "--min-workers", "2", *OPTIONS)
    with shell.started(*options) as job:
        shell.wait_for(RunDir(shell.folder / "few").checkpoints / "step-000002")
        os.kill(children_of(job.pid)[-1], signal.SIGKILL)
        outcome = shell.end_of(job)
    assert outcome.exitcode != 0
    assert "only 1 rank survives, fewer than min_world=2" in outcome.err
    assert "--resume  goes on from" in outcome.err
