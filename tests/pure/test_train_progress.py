"""The progress that training shows, on a terminal and without one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fullshard.progress import Operation, on_progress
from fullshard.train import showing
from fullshard.train.run.metrics import StepRecord
from fullshard.train.run.progress import Reporter, say, wrapped


def record(step: int, **changes: float) -> StepRecord:
    figures = {"loss": 2.5, "tokens_per_s": 8512.3, "lr": 1e-3, "grad_norm": 0.4, "seconds": 0.2}
    figures |= {"waiting": 0.125, **changes}
    return StepRecord(step=step, peak_memory_nbytes=512_000_000, shard_nbytes=5_100_000, **figures)


def seen_on_a_terminal(
    *records: StepRecord, width: int = 80, saved_step: int | None = None, **known: float
) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    clock = iter(range(1000)).__next__
    with Reporter(
        first=0, total=600, enabled=True, console=console, clock=clock, **known
    ) as reporter:
        reporter.saved_step = saved_step
        for each in records:
            reporter.show(each)
    return screen.getvalue()


@pytest.mark.parametrize(("width", "rows"), [(40, 9), (60, 5), (80, 3), (200, 3)])
def test_a_terminal_shows_how_it_learns_and_what_it_costs(width: int, rows: int) -> None:
    known = {"flops": 1e12, "device_nbytes": 1_024_000_000}
    seen = seen_on_a_terminal(record(312, waiting=0.123), width=width, saved_step=300, **known)
    frame = seen.splitlines()[-1 - rows : -1]
    words = " ".join(" ".join(seen.splitlines()).split())
    for figure in (
        "step 312/600",
        "0:02, 0:01 left",
        "loss 2.500",
        "grad norm 0.40",
        "learning rate 1.00e-03",
        "tokens/s 8,512",
        "TFLOP/s each 5",
        "waiting 12% of a step",
        "peak memory 512 MB (50%)",
        "shards 5.1 MB",
        "checkpoint step 300",
    ):
        assert figure in words, seen
    assert max(map(len, frame)) <= width


def test_a_terminal_leaves_out_what_is_not_known() -> None:
    seen = seen_on_a_terminal(record(1))
    assert "FLOP" not in seen and "(" not in seen and "checkpoint" not in seen


def test_lines_break_between_words_and_labels_stay_alone() -> None:
    text = (
        "metrics      runs/a-long-name/metrics.jsonl: 3.09 bits per byte\n\nschedule: 4 steps of 8"
    )
    assert wrapped(text, 40).split("\n") == [
        "metrics",
        "             runs/a-long-name/metrics.jsonl:",
        "             3.09 bits per byte",
        "",
        "schedule: 4 steps of 8",
    ]
    assert wrapped(text, 200) == text
    assert wrapped("fullshard: note: two words and more", 20).split("\n") == [
        "fullshard: note: two",
        "    words and more",
    ]


def test_what_is_no_terminal_gets_lines_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    say("word " * 100)
    assert capsys.readouterr().out == "word " * 100 + "\n"


def test_an_evaluation_stays_on_the_screen() -> None:
    screen = seen_on_a_terminal(record(100, eval_bits_per_byte=2.345), record(101))
    assert "step 100: 2.345 bits per byte of held-out text" in screen


def test_without_a_terminal_it_is_some_lines_of_keys_and_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Reporter(first=0, total=600, enabled=True) as reporter:
        for step in range(1, 601):
            reporter.show(record(step))
    lines = capsys.readouterr().out.splitlines()
    assert 30 <= len(lines) <= 32
    fields = dict(field.split("=") for field in lines[-1].split())
    assert fields["step"] == "600/600"
    assert float(fields["loss"]) == 2.5
    assert int(fields["peak_memory_nbytes"]) == 512_000_000
    assert int(fields["shard_nbytes"]) == 5_100_000
    assert float(fields["waiting"]) == 0.125


def test_other_workers_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(first=0, total=2, enabled=False) as reporter:
        reporter.show(record(1))
    assert capsys.readouterr().out == ""


def test_a_terminal_shows_what_runs_besides_training_until_it_ends() -> None:
    frames = []
    for evaluated in (32, 64):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=True, width=80, color_system=None)
        with Reporter(first=0, total=600, enabled=True, console=console) as reporter:
            reporter.show(record(100))
            with on_progress(reporter.show_operation):
                evaluating = Operation("evaluating", 64, "sequences")
                saving = Operation("saving", 8 * 10**9)
            evaluating.add(evaluated)
            saving.add(2 * 10**9)
        frames.append(screen.getvalue())
    assert "evaluating: 32 of 64 sequences" in frames[0] and "evaluating" not in frames[1]
    assert all("loss" in frame and "saving: 2 GB of 8 GB" in frame for frame in frames)


def test_without_a_terminal_long_operations_print_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(showing, "_LINE_S", 0.0)
    seconds = iter(range(0, 100, 2))
    monkeypatch.setattr(showing.time, "monotonic", lambda: next(seconds))
    for enabled in (True, False):
        with (
            Reporter(first=0, total=600, enabled=enabled) as reporter,
            on_progress(reporter.show_operation),
        ):
            Operation("evaluating", 64, "sequences").add(16)
    assert capsys.readouterr().err.splitlines() == [
        "evaluating: 0 of 64 sequences",
        "evaluating: 16 of 64 sequences, 0.1 s each, 6 s left",
    ]
