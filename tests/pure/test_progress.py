"""Long operations report their progress, and the commands show it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fullshard import checkpoint, plan
from fullshard.progress import Operation, Progress, on_progress
from fullshard.train import showing
from fullshard.train.showing import showing_progress

NBYTES = 4 * (300 * 200 + 200)
"""Bytes of the model in these tests."""


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(300, 200)


def seen_in(act: Callable[[], object]) -> list[Progress]:
    seen: list[Progress] = []
    with on_progress(seen.append):
        act()
    return seen


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "saved", model_of(0), step=1)
    return tmp_path / "saved"


def test_each_operation_on_files_counts_from_nothing_to_all_bytes(
    saved: Path, tmp_path: Path
) -> None:
    checkpoint.save_weights(model_of(0), tmp_path / "weights")
    checkpoint.save(tmp_path / "other", model_of(1), step=1)
    operations: dict[str, Callable[[], object]] = {
        "saving": lambda: checkpoint.save(tmp_path / "new", model_of(0), step=2),
        "loading saved": lambda: checkpoint.load(saved, model_of(1)),
        "converting saved": lambda: checkpoint.convert(saved, tmp_path / "file", to="torch"),
        "saving weights": lambda: checkpoint.save_weights(model_of(0), tmp_path / "exported"),
        "loading weights": lambda: checkpoint.load_weights(model_of(1), tmp_path / "weights"),
    }
    for what, act in operations.items():
        seen = seen_in(act)
        done = [one.done for one in seen]
        assert {one._replace(done=0) for one in seen} == {Progress(what, 0, NBYTES, "bytes")}
        assert done[0] == 0 and done == sorted(done) and done[-1] == NBYTES, (what, done)


@pytest.mark.parametrize("what", ["verifying saved", "comparing saved and other"])
def test_reading_whole_files_counts_their_tensors(what: str, saved: Path, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "other", model_of(1), step=1)
    is_comparison = what.startswith("comparing")
    act = (
        (lambda: list(checkpoint.differences(saved, tmp_path / "other")))
        if is_comparison
        else (lambda: checkpoint.verify(saved))
    )
    seen = seen_in(act)
    assert {one.what for one in seen} == {what}
    assert seen[-1].done == NBYTES * (2 if is_comparison else 1)
    assert seen[-1].done <= seen[-1].total < 1.2 * seen[-1].done  # the total includes headers


def test_the_choices_of_a_plan_are_counted() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    found = []

    def act() -> None:
        batch = torch.zeros(2, 64)
        found.append(plan(model, batch=batch, world_size=4, budget_nbytes=10**9))

    seen = seen_in(act)
    assert {one.what for one in seen} == {"planning"} and seen[-1].total is None
    assert seen[-1].done == len(found[0].tried) > 1 and seen[-1].unit == "choices"


def test_an_error_of_the_listener_ends_the_operation(saved: Path) -> None:
    model = model_of(1)

    def refuse(progress: Progress) -> None:
        if progress.done:
            raise ValueError("no more")

    with on_progress(refuse), pytest.raises(Exception, match="no more"):
        checkpoint.load(saved, model)
    assert torch.equal(model.weight, model_of(1).weight)
    checkpoint.load(saved, model)
    assert torch.equal(model.weight, model_of(0).weight)


def test_a_context_ends(saved: Path) -> None:
    assert seen_in(lambda: None) == []
    outer: list[Progress] = []
    with on_progress(outer.append):
        inner = seen_in(lambda: checkpoint.load(saved, model_of(1)))
        before = len(outer)
        checkpoint.load(saved, model_of(1))
    checkpoint.load(saved, model_of(1))
    assert before == 0 and len(outer) == len(inner)


def work_in(monkeypatch: pytest.MonkeyPatch, *amounts: int, **kind: object) -> None:
    seconds = iter(range(0, 100, 2))
    monkeypatch.setattr(showing.time, "monotonic", lambda: next(seconds))
    work = Operation("loading step-000100", **kind)
    for amount in amounts:
        work.add(amount)


def test_without_a_terminal_there_is_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with showing_progress():
        work_in(monkeypatch, *[10**9] * 8, total=8 * 10**9)
    assert capsys.readouterr().err.splitlines() == [
        "loading step-000100: 3 GB of 8 GB, 500 MB/s, 10 s left",
        "loading step-000100: 6 GB of 8 GB, 500 MB/s, 4 s left",
    ]


def test_what_is_over_soon_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with showing_progress():
        work_in(monkeypatch, 10**9, 10**9, total=2 * 10**9)
    with showing_progress(enabled=False):
        work_in(monkeypatch, *[10**9] * 8, total=8 * 10**9)
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_a_bar_is_shown_and_removed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with showing_progress():
        Operation("loading step-000100", 8 * 10**9).add(2 * 10**9)
    drawn = capsys.readouterr().err
    told = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
    assert "loading step-000100" in told and "2 GB of 8 GB" in told
    assert drawn.rindex("\x1b[2K") > drawn.rindex("8 GB")  # the line is erased at the end


def test_what_is_printed_beside_a_bar_stays_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with showing_progress():
        Operation("loading step-000100", 8 * 10**9).add(2 * 10**9)
        print("{}")
    seen = capsys.readouterr()
    assert seen.out == "{}\n" and "{}" not in seen.err


def test_the_command_shows_it(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fullshard.cli.checkpoints import verify_command

    monkeypatch.setattr(showing, "_LINE_S", 0.0)
    verify_command(str(saved))
    seen = capsys.readouterr()
    assert seen.out == f"{saved}: intact\n"
    assert re.search(r"^verifying saved: 241 kB of 24\d kB, .+/s, 0 s left$", seen.err, re.M)
