"""Runs of two workers that ``--patience`` ends early, and their checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fullshard.train.config import TrainConfig
from fullshard.train.run.best import read_best
from fullshard.train.run.folder import RunDir
from tests.ranks.train_shell import Outcome, Shell, torchrun

# The learning rate is far too high, so the held-out loss rises after the warm-up.
OPTIONS = "--data text --steps 40 --batch 2 --seq 32 --lr 0.3 --warmup 4 --eval-every 2".split()


@pytest.fixture(scope="module")
def impatient(shell: Shell) -> Outcome:
    """Train until two evaluations are worse; keep the newest and the best checkpoint."""
    options = "--out impatient --save-every 2 --keep 1 --patience 2 --sample off".split()
    return shell.train(*OPTIONS, *options)


def evaluated(shell: Shell, run: str) -> dict[int, float]:
    key = "eval_bits_per_byte"
    return {one["step"]: one[key] for one in shell.metrics(run) if key in one}


def end_by(losses: dict[int, float], patience: int) -> int:
    """Return the step after which ``patience`` ends a run with these held-out losses."""
    lowest, waited = float("inf"), 0
    for step, bits in losses.items():
        lowest, waited = (bits, 0) if bits < lowest else (lowest, waited + 1)
        if waited == patience:
            return step
    raise AssertionError(f"the held-out loss went on falling: {losses}")


def test_it_ends_when_the_held_out_loss_has_not_fallen_for_so_long(
    shell: Shell, impatient: Outcome
) -> None:
    assert impatient.exitcode == 0, impatient.err
    losses = evaluated(shell, "impatient")
    step = max(losses)
    assert step == end_by(losses, 2) < 40
    best = min(losses, key=lambda one: losses[one])
    told = (
        f"ended after step {step} of 40 by --patience 2: held-out loss was lowest at step {best} "
        f"({losses[best]:.4f} bits per byte), not in the last 2 evaluations"
    )
    assert told in impatient.out.splitlines()
    assert "a sample of what it writes now:" not in impatient.out
    assert f"step-{step:06d} is the newest, " in impatient.out
    run = RunDir(shell.folder / "impatient")
    assert [path.name for path in run.checkpoints.glob("step-*")] == [f"step-{step:06d}"]
    marked = read_best(run)
    assert marked is not None and (marked.path.parent, marked.step) == (run.best, best)
    assert losses[best] == marked.bits_per_byte
    assert f"{Path('impatient') / 'best' / marked.path.name} the best (" in impatient.out


def test_it_goes_on_by_a_greater_patience_only_and_counts_on(
    shell: Shell, impatient: Outcome
) -> None:
    end = max(evaluated(shell, "impatient"))
    refused = shell.train("--out", "impatient", "--resume")
    assert refused.exitcode == 2
    assert f"step-{end:06d} ended the run by --patience 2: " in refused.err
    assert refused.err.endswith("a greater --patience goes on\n") and refused.err.count("\n") == 1
    outcome = shell.train("--out", "impatient", "--resume", "--patience", "3")
    assert outcome.exitcode == 0, outcome.err
    losses = evaluated(shell, "impatient")
    assert max(losses) > end
    if "ended after step" in outcome.out:
        assert max(losses) == end_by(losses, 3)
    else:
        assert max(losses) == 40


def test_a_run_that_is_interrupted_while_it_waits_ends_at_the_same_step(
    shell: Shell, impatient: Outcome
) -> None:
    shutil.copytree(shell.folder / "impatient", shell.folder / "expected")
    losses = evaluated(shell, "expected")
    end = min(step for step in losses if step == end_by(losses, 2))
    options = "--out halted --save-every 2 --keep 1 --patience 2 --sample off".split()
    halted = shell.train(*OPTIONS, *options, "--stop-after", str(end - 2))  # one evaluation was bad
    assert halted.exitcode == 0, halted.err
    assert f"stopped after step {end - 2} of 40" in halted.out
    outcome = shell.train("--out", "halted", "--resume")
    assert outcome.exitcode == 0, outcome.err
    assert f"ended after step {end} of 40 by --patience 2: " in outcome.out
    found = evaluated(shell, "halted")
    assert found == {step: bits for step, bits in losses.items() if step <= end}
    best = read_best(RunDir(shell.folder / "halted"))
    assert best is not None and best.bits_per_byte == min(found.values())


def test_workers_of_torchrun_end_after_the_steps_of_their_epochs(shell: Shell) -> None:
    options = "--data text --epochs 0.05 --batch 2 --seq 32 --sample 3 --out part".split()
    outcome = shell.train(*options, program=torchrun(2))
    assert outcome.exitcode == 0, outcome.err
    config = TrainConfig.load(RunDir(shell.folder / "part").config)
    assert config.steps == len(shell.metrics("part")) < 600
    assert f"schedule: {config.steps} steps (--epochs 0.05 of " in outcome.out
    assert "a sample of what it writes now:" in outcome.out
