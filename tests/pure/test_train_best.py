"""The best checkpoint of a run: its choice, its place, and its changes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
from torch import nn

from fullshard import checkpoint
from fullshard.train.run.best import BestMark, read_best
from fullshard.train.run.folder import RunDir


def save(run: RunDir, step: int) -> Path:
    checkpoint.save(run.checkpoint(step), nn.Linear(1, 1), step=step)
    return run.checkpoint(step)


def evaluated(run: RunDir, losses: dict[int, float]) -> None:
    records = [{"step": step, "eval_bits_per_byte": bits} for step, bits in losses.items()]
    run.path.mkdir(exist_ok=True)
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))


def marked(mark: BestMark, run: RunDir, losses: dict[int, float | None]) -> list[int]:
    """Save checkpoints; return the best step after each."""
    found = []
    for step, bits in losses.items():
        save(run, step)
        mark.begin(step, bits)
        mark.end()
        best = read_best(run)
        found.append(0 if best is None else best.step)
    return found


def test_the_best_is_the_lowest_finite_loss_of_what_was_saved(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    mark = BestMark(run, is_apart=False)
    losses = {1: None, 2: math.nan, 3: 2.0, 4: 2.0, 5: math.inf, 6: 1.5, 7: None, 8: 1.75}
    assert marked(mark, run, losses) == [0, 0, 3, 3, 3, 6, 6, 6]
    facts = json.loads(run.best_mark.read_text())
    assert facts == {"step": 6, "eval_bits_per_byte": 1.5, "checkpoint": "checkpoints/step-000006"}
    assert not run.best.exists()


def test_a_run_without_an_evaluation_has_no_best(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    mark = BestMark(run, is_apart=True)
    assert marked(mark, run, {1: None}) == [0]
    mark.resume(1)
    assert read_best(run) is None and not run.best_mark.exists()


@pytest.mark.parametrize("links", [True, False])
def test_apart_it_outlives_the_checkpoints(
    tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError("this file system has no links")

    if not links:
        monkeypatch.setattr("os.link", link)
    run = RunDir(tmp_path)
    mark = BestMark(run, is_apart=True)
    assert marked(mark, run, {1: 2.0, 2: 1.0, 3: 3.0}) == [1, 2, 2]
    assert [path.name for path in run.best.iterdir()] == ["step-000002"]
    file = next(run.best.glob("*/*.safetensors"))
    assert file.stat().st_nlink == (2 if links else 1)
    for step in (1, 2):
        for path in run.checkpoint(step).iterdir():
            path.unlink()
        run.checkpoint(step).rmdir()
    best = read_best(run)
    assert best is not None and best.path == run.best / "step-000002"
    assert checkpoint.verify(best.path).step == 2
    assert json.loads(run.best_mark.read_text())["checkpoint"] == "best/step-000002"


def test_a_checkpoint_that_is_not_complete_is_never_marked(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    mark = BestMark(run, is_apart=True)
    save(run, 1)
    for step in (1, 2):
        mark.begin(step, 2.0 / step)
        mark.end()
    best = read_best(run)
    assert best is not None and best.step == 1


def test_a_job_that_was_killed_before_its_mark_finds_it_when_it_goes_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    evaluated(run, {1: 3.0, 2: 1.0, 3: 2.0, 4: 0.5})  # no complete checkpoint of step 4
    for step in (1, 2, 3):
        save(run, step)
    mark = BestMark(run, is_apart=True)
    mark.resume(3)
    best = read_best(run)
    assert best is not None
    assert (best.step, best.bits_per_byte, best.path) == (2, 1.0, run.checkpoint(2))
    assert (run.best / "step-000002").is_dir()
    assert marked(mark, run, {5: 1.5, 6: 0.75}) == [2, 6]


def test_going_back_forgets_the_best_of_steps_that_are_computed_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    mark = BestMark(run, is_apart=True)
    marked(mark, run, {1: 3.0, 2: 2.0, 3: 1.0})
    evaluated(run, {1: 3.0, 2: 2.0})
    again = BestMark(run, is_apart=True)
    again.resume(2)
    best = read_best(run)
    assert best is not None and best.step == 2
    assert [path.name for path in run.best.iterdir()] == ["step-000002"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": "many", "eval_bits_per_byte": 1}'])
def test_a_damaged_mark_is_none_and_is_made_anew(tmp_path: Path, text: str) -> None:
    run = RunDir(tmp_path)
    evaluated(run, {1: 3.0})
    save(run, 1)
    run.best_mark.write_text(text)
    assert read_best(run) is None
    BestMark(run, is_apart=False).resume(1)
    best = read_best(run)
    assert best is not None and asdict(best)["step"] == 1


def test_a_new_start_puts_the_best_aside_with_the_rest(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    marked(BestMark(run, is_apart=True), run, {1: 1.0})
    aside = run.set_aside(resumes=False)
    assert aside is not None
    assert {path.name for path in aside.iterdir()} == {"best", "best.json", "checkpoints"}
    assert read_best(run) is None and read_best(RunDir(aside)) is not None
