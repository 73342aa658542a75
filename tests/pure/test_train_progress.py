"""What one sees while it trains: on a terminal, and where there is none."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fullshard.train.run.metrics import StepRecord
from fullshard.train.run.progress import Reporter, plain_console


def record(step: int, **changes: float) -> StepRecord:
    figures = {"loss": 2.5, "tokens_per_s": 8512.3, "lr": 1e-3, "grad_norm": 0.4, "seconds": 0.2}
    figures |= {"waiting": 0.125, **changes}
    return StepRecord(step=step, peak_memory_nbytes=512_000_000, shard_nbytes=5_100_000, **figures)


def seen_on_a_terminal(*records: StepRecord, width: int = 80) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    with Reporter(first=0, total=600, enabled=True, console=console) as reporter:
        for each in records:
            reporter.show(each)
    return screen.getvalue()


def test_a_terminal_shows_how_it_learns_and_what_it_costs_within_80_columns() -> None:
    frame = seen_on_a_terminal(record(312, waiting=0.123)).splitlines()[-4:-1]
    words = " ".join(" ".join(frame).split())
    for figure in (
        "step 312/600",
        "left",
        "loss 2.500",
        "grad norm 0.40",
        "tokens/s 8,512",
        "peak memory/rank 512 MB",
        "shards/rank 5.1 MB",
        "waiting 12% of a step",
    ):
        assert figure in words
    assert max(map(len, frame)) <= 80


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
    plain_console(enabled=False).print("a word")
    assert capsys.readouterr().out == ""
